"""Create, set aside and remove checkpoint folders; check for disk space before a save. See `folders` for the marks."""

import errno
import os
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from data.storage.url import Place
from mimo_train.checkpoint.folders import DAMAGED, complete, contents, every, step_folder, step_in
from mimo_train.checkpoint.format.files import COMPLETE, PARTIAL, make_folder, remove_files, write_file
from mimo_train.config.errors import UserError


def begin(run_dir: Place, step: int, non_persistent: bool, nbytes: int) -> Place:
    """Create the folder for a checkpoint of `nbytes`, with its PARTIAL mark, after removing unfinished saves.

    Raises:
        OSError: it cannot be created, or there is not enough space.
    """
    remove_unfinished(run_dir, non_persistent)
    first = step_folder(run_dir, step, non_persistent)
    taken = {folder.path.name for folder in every(run_dir, non_persistent)}
    names = (first.name, *(f"{first.name}.{number:03d}" for number in range(2, 1000)))
    folder = first.with_name(next(name for name in names if name not in taken))
    if isinstance(folder, Path):
        make_folder(folder.parent)
        require_room(folder.parent, nbytes)
        folder.mkdir()
    write_file(folder / PARTIAL, [])
    return folder


def require_begun(folder: Place) -> None:
    """Raise OSError if this rank does not see the folder that rank 0 has created."""
    if PARTIAL not in contents(folder).names:
        where = "all ranks need the same storage, endpoint and credentials"
        if isinstance(folder, Path):
            where = "run.dir must be on a file system that all nodes see"
        raise OSError(errno.ENOENT, f"made by rank 0, and not there for another rank: {where}", str(folder / PARTIAL))


def set_aside(folder: Place, error: UserError) -> None:
    """Mark a checkpoint as damaged, as `error` says; it is never removed. Raises UserError if it cannot be marked."""
    try:
        write_file(folder / DAMAGED, [])
    except OSError as failure:
        raise UserError(f"{error}\nand it cannot be marked ({failure}): rename or remove it") from error


def remove_unfinished(run_dir: Place, non_persistent: bool = False) -> None:
    """Remove what unfinished saves and removals have left. Raises OSError if it cannot be removed."""
    for folder in every(run_dir, non_persistent):
        if folder.is_unfinished:
            remove(folder.path)
        elif folder.is_complete and PARTIAL in folder.names:  # killed between the marker and the end
            remove_files([folder.path / PARTIAL])


def remove_old(
    run_dir: Place,
    keep: int,
    non_persistent: bool = False,
    keep_every: int = 0,
    best: Sequence[int] = (),
    best_count: int = 0,
) -> None:
    """Remove checkpoints beyond `keep`, and those of steps that were saved again.

    Args:
        keep: number of complete checkpoints to keep; 0 keeps all. One non-persistent checkpoint is kept.
        non_persistent: kind of the checkpoints.
        keep_every: keep every step that is a multiple of this; 0 for none.
        best: steps in the order of `checkpoint.keep_best`, the best first.
        best_count: number of these to keep, of those that have a persistent checkpoint.

    Raises:
        OSError: one cannot be removed.
    """
    keep, multiple, best_count = (1, 0, 0) if non_persistent else (keep, keep_every, best_count)
    checkpoints = complete(run_dir, non_persistent)
    replaced = [folder for folder, following in pairwise(checkpoints) if step_in(folder) == step_in(following)]
    kept = [folder for folder in checkpoints if folder not in replaced]
    existing = {step_in(folder) for folder in kept}
    spared = set([step for step in best if step in existing][:best_count])
    old = kept[:-keep] if keep else []
    old = [folder for folder in old if (not multiple or step_in(folder) % multiple) and step_in(folder) not in spared]
    for folder in (*replaced, *old):
        remove(folder)


def remove(folder: Place) -> None:
    """Remove a checkpoint or its remains. A kill, or files that cannot be removed, leave an unfinished one.

    Raises:
        OSError: it cannot be removed.
    """
    names = contents(folder).names
    if PARTIAL not in names and names:
        write_file(folder / PARTIAL, [])
    # Remove the marker first: without it the folder is no checkpoint.
    for group in ({COMPLETE}, names - {COMPLETE, PARTIAL}, {PARTIAL}):
        remove_files([folder / name for name in group & {*names, PARTIAL}])
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)


def require_room(folder: Path, nbytes: int) -> None:
    """Raise OSError if the file system has less than `nbytes` free. Unknown sizes pass."""
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < nbytes:
        sizes = f"a checkpoint takes {nbytes / 1e9:.3g} GB and {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder))
