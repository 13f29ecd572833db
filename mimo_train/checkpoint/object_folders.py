"""Checkpoint folders in object storage, where marks replace renames.

A checkpoint has its final place from the start; as everywhere, its marker makes it complete. Further marks:

PARTIAL   it is being written or removed; the next save removes it (`step_N.partial` on file systems)
DAMAGED   a run has set it aside; nothing removes it (`step_N.damaged`)

A step that is saved again goes into `step_N.002`, next to the older one until that is removed.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from data.storage.object_store import store_of
from data.storage.url import ObjectMeta, Url
from mimo_train.checkpoint.format.files import COMPLETE, PARTIAL, objects_in

DAMAGED = "DAMAGED"
STEP = re.compile(r"step_(\d{8})(?:\.(\d{3}))?")
"""Names of checkpoints: the step, and a number if it is not the step's first."""


@dataclass
class Folder:
    """A folder of objects."""

    url: Url
    objects: dict[str, ObjectMeta] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if it has the marker of a complete checkpoint and was not set aside."""
        return COMPLETE in self.objects and not self.is_set_aside

    @property
    def is_set_aside(self) -> bool:
        """True if a run has found it damaged."""
        return DAMAGED in self.objects

    @property
    def is_unfinished(self) -> bool:
        """True during a write or removal, or after one that was killed."""
        return PARTIAL in self.objects and COMPLETE not in self.objects and not self.is_set_aside


def in_folder(url: Url) -> Folder:
    """Return the contents of a folder. Raises OSError if it cannot be listed."""
    return Folder(url, objects_in(url))


def every(parent: Url) -> list[Folder]:
    """Return every folder named as a checkpoint, sorted by name. Raises OSError if they cannot be listed."""
    folders: dict[Url, Folder] = {}
    for found in store_of(parent).list(parent):
        url = found.url.parent
        if url.parent == parent and STEP.fullmatch(url.name):
            folders.setdefault(url, Folder(url)).objects[found.url.name] = found
    return sorted(folders.values(), key=lambda folder: folder.url)


def named(parent: Url) -> list[Url]:
    """Return folders that are neither unfinished nor set aside, by name; errors as in `every`."""
    return [folder.url for folder in every(parent) if not folder.is_unfinished and not folder.is_set_aside]


def complete(parent: Url) -> list[Url]:
    """Return complete checkpoints by name; errors as in `every`."""
    return [folder.url for folder in every(parent) if folder.is_complete]


def begin(parent: Url, name: str) -> Url:
    """Create a folder with a PARTIAL mark for a checkpoint, under this name or the next free one.

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
    """Raise OSError if this rank does not see the PARTIAL mark of rank 0."""
    try:
        store_of(url).look(url / PARTIAL)
    except FileNotFoundError:
        said = "it is not there for this rank: all ranks need the same storage, endpoint and credentials"
        raise OSError(errno.ENOENT, said, str(url / PARTIAL)) from None


def remove(url: Url) -> None:
    """Remove a checkpoint or its remains. A kill leaves an unfinished one. Raises OSError if it cannot be removed."""
    store, objects = store_of(url), in_folder(url).objects
    if COMPLETE in objects:
        store.put(url / PARTIAL, b"")
        store.remove([url / COMPLETE])
    rest = [url / name for name in objects if name not in (COMPLETE, PARTIAL)]
    if rest:
        store.remove(rest)
    store.remove([url / PARTIAL])


def remove_unfinished(parent: Url) -> None:
    """Remove what unfinished saves and removals have left. Errors as in `remove`."""
    for folder in every(parent):
        if folder.is_unfinished:
            remove(folder.url)
        elif folder.is_complete and PARTIAL in folder.objects:  # killed between the marker and the end
            store_of(parent).remove([folder.url / PARTIAL])


def set_aside(url: Url) -> Url:
    """Mark a checkpoint as damaged and return the mark. Raises OSError if it cannot be written."""
    store_of(url).put(url / DAMAGED, b"")
    return url / DAMAGED


def is_there(url: Url) -> bool:
    """True if the object exists. Raises OSError if the storage does not answer."""
    try:
        store_of(url).look(url)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or os.strerror(errno.EIO), str(url)) from error
    return True
