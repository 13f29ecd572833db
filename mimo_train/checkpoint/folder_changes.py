"""Create, rename, set aside and remove checkpoint folders; check for disk space before a save."""

import errno
import os
import shutil
from collections.abc import Collection
from itertools import count, pairwise
from pathlib import Path

from data.storage.url import Place, Url
from mimo_train.checkpoint import object_folders as objects
from mimo_train.checkpoint.damage import failure_named
from mimo_train.checkpoint.folders import (
    checkpoints_dir,
    complete,
    final_folder,
    is_complete,
    listed,
    partial_folder,
    step_in,
)
from mimo_train.checkpoint.format.files import COMPLETE, make_folder
from mimo_train.config.errors import UserError


def begin(run_dir: Place, step: int, non_persistent: bool, nbytes: int) -> tuple[Place, Place]:
    """Create the folder for a checkpoint of `nbytes`, after removing unfinished saves.

    Returns:
        (the folder to write into; its name when it is complete).

    Raises:
        OSError: it cannot be created, or there is not enough space.
    """
    remove_unfinished(run_dir, non_persistent)
    final, partial = final_folder(run_dir, step, non_persistent), partial_folder(run_dir, step, non_persistent)
    if isinstance(final, Url) or isinstance(partial, Url):
        assert isinstance(final, Url), final
        begun = objects.begin(final.parent, final.name)
        return begun, begun
    make_folder(partial.parent)
    require_room(partial.parent, nbytes)
    partial.mkdir()
    return partial, final


def require_shared(partial: Place) -> None:
    """Raise UserError (OSError in object storage) if this rank does not see the folder that rank 0 created."""
    if isinstance(partial, Url):
        objects.require_begun(partial)
    elif not partial.is_dir():
        raise UserError(
            f"run.dir: {partial} was made by rank 0 and is not there for another rank: run.dir must be on a file "
            "system that all nodes see"
        )


def holds(folder: Place, names: Collection[str]) -> bool:
    """True if a folder has all of these files. Raises OSError of object storage."""
    there = objects.in_folder(folder).objects if isinstance(folder, Url) else os.listdir(folder)
    return set(names) <= set(there)


def finish_renames(run_dir: Place) -> None:
    """Finish renames that a kill interrupted: after the marker, or between the two renames that replace a folder. Only
    the process that writes into `run_dir` may call it. Raises FolderFailed."""
    for kind in (False, True):
        folder = checkpoints_dir(run_dir, kind)
        if isinstance(folder, Url):
            return  # objects have no renames
        for pattern in ("step_????????.partial", "step_????????.old.partial"):  # the new one first
            for found in listed(folder, pattern):
                final = found.with_name(found.name.partition(".")[0])
                if is_complete(found) and not os.path.lexists(final):
                    with failure_named(folder):
                        found.rename(final)


def set_aside(folder: Place) -> Place:
    """Rename a damaged checkpoint, or mark it in object storage, and return the new name or the mark.

    It is never removed.

    Raises:
        OSError: the folder cannot be renamed or marked.
    """
    if isinstance(folder, Url):
        return objects.set_aside(folder)
    for number in count(1):
        aside = folder.with_name(f"{folder.name}.damaged{f'.{number}' if number > 1 else ''}")
        if not os.path.lexists(aside):
            folder.rename(aside)
            return aside
    raise AssertionError("unreachable")


def remove_unfinished(run_dir: Place, non_persistent: bool = False) -> None:
    """Remove what unfinished saves have left."""
    folder = checkpoints_dir(run_dir, non_persistent)
    if isinstance(folder, Url):
        objects.remove_unfinished(folder)
        return
    finish_renames(run_dir)
    for partial in listed(folder, "*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def remove_old(run_dir: Place, keep: int, non_persistent: bool = False, keep_every: int = 0) -> None:
    """Remove checkpoints beyond `keep`.

    Args:
        keep: number of complete checkpoints to keep; 0 keeps all. One non-persistent checkpoint is kept.
        non_persistent: kind of the checkpoints.
        keep_every: keep every step that is a multiple of this; 0 for none.

    Raises:
        OSError: one cannot be removed.
    """
    keep, every = (1, 0) if non_persistent else (keep, keep_every)
    found = complete(run_dir, non_persistent)
    # In object storage, a step that was saved again still has its earlier checkpoint.
    before = [one for one, after in pairwise(found) if step_in(one) == step_in(after)]
    found = [folder for folder in found if folder not in before]
    old = [folder for folder in found[:-keep] if not every or step_in(folder) % every] if keep else []
    for folder in (*before, *old):
        remove(folder)


def remove(folder: Place) -> None:
    """Remove a checkpoint or its remains. Files that cannot be removed no longer count as a checkpoint.

    Raises:
        OSError: it cannot be removed.
    """
    if isinstance(folder, Url):
        return objects.remove(folder)
    # Remove the marker first: without it the folder is no checkpoint.
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def require_room(folder: Path, nbytes: int) -> None:
    """Raise OSError if the file system has less than `nbytes` free. Unknown sizes pass."""
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < nbytes:
        sizes = f"a checkpoint takes {nbytes / 1e9:.3g} GB and {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder))
