"""Folders of checkpoints in object storage: what stands for the names that folders of files have.

Nothing can be renamed there, so that a checkpoint has its final place from the start. It is one when its marker is
there, as everywhere. Beside it, a mark says what another name says of a folder of files:

PARTIAL   it is being written or removed, and is none: the next save removes it (`step_N.partial`)
DAMAGED   a run has set it aside, and nothing removes it (`step_N.damaged`)

Where a step is saved again, the new one stands beside the older one, as `step_N.002`, until that is removed.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from data.storage.stores import store_of
from data.storage.url import ObjectMeta, Url
from mimo_train.checkpoint.format.files import COMPLETE, PARTIAL, objects_in

DAMAGED = "DAMAGED"
STEP = re.compile(r"step_(\d{8})(?:\.(\d{3}))?")
"""Names of checkpoints: step, and which one of that step, if it is not the first."""


@dataclass
class Folder:
    """A folder of objects."""

    url: Url
    objects: dict[str, ObjectMeta] = field(default_factory=dict)
    """By name."""

    @property
    def is_complete(self) -> bool:
        """Whether it has the marker of a complete checkpoint, and is none that was set aside."""
        return COMPLETE in self.objects and not self.is_set_aside

    @property
    def is_set_aside(self) -> bool:
        """Whether a run has found it damaged."""
        return DAMAGED in self.objects

    @property
    def is_unfinished(self) -> bool:
        """Whether it is being written or removed, or was when its run was killed."""
        return PARTIAL in self.objects and COMPLETE not in self.objects and not self.is_set_aside


def in_folder(url: Url) -> Folder:
    """What is in one folder.

    Raises:
        OSError: it cannot be listed.
    """
    return Folder(url, objects_in(url))


def every(parent: Url) -> list[Folder]:
    """Every folder that has the name of a checkpoint, by name.

    Raises:
        OSError: they cannot be listed.
    """
    folders: dict[Url, Folder] = {}
    for found in store_of(parent).list(parent):
        url = found.url.parent
        if url.parent == parent and STEP.fullmatch(url.name):
            folders.setdefault(url, Folder(url)).objects[found.url.name] = found
    return sorted(folders.values(), key=lambda folder: folder.url)


def named(parent: Url) -> list[Url]:
    """Folders that are checkpoints or should be: neither unfinished nor set aside. By name; errors as of `every`."""
    return [folder.url for folder in every(parent) if not folder.is_unfinished and not folder.is_set_aside]


def complete(parent: Url) -> list[Url]:
    """Complete checkpoints, by name; errors as of `every`."""
    return [folder.url for folder in every(parent) if folder.is_complete]


def begin(parent: Url, name: str) -> Url:
    """A new folder for a checkpoint, marked as unfinished: of this name, or of the first of it that is free.

    Raises:
        OSError: it cannot be written.
    """
    taken = {folder.url.name for folder in every(parent)}
    url = parent / next(one for one in _names(name) if one not in taken)
    store_of(url).put(url / PARTIAL, b"")
    return url


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}.{number:03d}" for number in range(2, 1000))


def require_begun(url: Url) -> None:
    """Raises OSError where the mark of an unfinished checkpoint, which rank 0 has put there, is not to be seen."""
    try:
        store_of(url).look(url / PARTIAL)
    except FileNotFoundError:
        said = "it is not there for this rank: all ranks need the same storage, endpoint and credentials"
        raise OSError(errno.ENOENT, said, str(url / PARTIAL)) from None


def remove(url: Url) -> None:
    """Remove a checkpoint, or what there is of one. A kill leaves one that is unfinished.

    Raises:
        OSError: it cannot be removed.
    """
    store, objects = store_of(url), in_folder(url).objects
    if COMPLETE in objects:
        store.put(url / PARTIAL, b"")
        store.remove([url / COMPLETE])
    rest = [url / name for name in objects if name not in (COMPLETE, PARTIAL)]
    if rest:
        store.remove(rest)
    store.remove([url / PARTIAL])


def remove_unfinished(parent: Url) -> None:
    """Remove what earlier saves have not finished, or not finished to remove. Errors as of `remove`."""
    for folder in every(parent):
        if folder.is_unfinished:
            remove(folder.url)
        elif folder.is_complete and PARTIAL in folder.objects:  # killed between the marker and the end
            store_of(parent).remove([folder.url / PARTIAL])


def set_aside(url: Url) -> Url:
    """Mark a checkpoint as damaged; returns the mark.

    Raises:
        OSError: it cannot be written.
    """
    store_of(url).put(url / DAMAGED, b"")
    return url / DAMAGED


def is_there(url: Url) -> bool:
    """Whether there is such an object.

    Raises:
        OSError: the storage does not tell.
    """
    try:
        store_of(url).look(url)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or os.strerror(errno.EIO), str(url)) from error
    return True
