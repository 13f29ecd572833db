"""Find checkpoint folders (read only): names, completeness, the newest, and the base of trained-only checkpoints.

They are on file systems or in object storage (`object_folders`). A `run_dir` is `run.dir` or `checkpoint.dir`: the
folder or URL that contains `checkpoints`.
"""

import json
import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from data.storage.url import WEB, Place, Url, place_of
from mimo_train.checkpoint import object_folders as objects
from mimo_train.checkpoint.damage import (
    REMEDY,
    DamagedCheckpoint,
    all_damaged,
    damage_named,
    damaged,
    failure_named,
    require_own_format,
    unreadable,
)
from mimo_train.checkpoint.format.files import COMPLETE, marked_file, patiently
from mimo_train.checkpoint.format.read import Reader
from mimo_train.config.errors import UserError
from mimo_train.layout.ranks import RunLayout

RECORD = "run.json"
"""File in a checkpoint: the run's progress, config, layout and fingerprints."""

LEFT_OUT = "left_out"
"""Key of a record: the fingerprint of the weights that the checkpoint leaves out; missing if it has all."""

LAYOUT = ("first_rank", "tp", "cp", "dp", "pp", "vpp", "ep", "etp")
"""Fields of a module's layout in a record, in this order."""


def checkpoints_dir(run_dir: Place, non_persistent: bool = False) -> Place:
    """Return the folder of a run's checkpoints, or of the non-persistent ones, of which only the newest is kept."""
    return run_dir / "checkpoints" / "non_persistent" if non_persistent else run_dir / "checkpoints"


def final_folder(run_dir: Place, step: int, non_persistent: bool = False) -> Place:
    """Return the folder of the complete checkpoint of a step."""
    return checkpoints_dir(run_dir, non_persistent) / f"step_{step:08d}"


def partial_folder(run_dir: Place, step: int, non_persistent: bool = False) -> Place:
    """Return the folder that a checkpoint is written into before it is renamed."""
    return final_folder(run_dir, step, non_persistent).with_name(f"step_{step:08d}.partial")


def step_in(folder: Place) -> int:
    """Return the step in a checkpoint's name."""
    named = objects.STEP.fullmatch(folder.name)
    assert named, folder
    return int(named[1])


def run_of(folder: Place) -> Place | None:
    """Return the folder of the run that wrote a checkpoint; None if it was moved elsewhere."""
    return next((parent.parent for parent in folder.absolute().parents if parent.name == "checkpoints"), None)


def named(run_dir: Place, non_persistent: bool) -> list[Place]:
    """Return everything of one kind that is named as a checkpoint, complete or not, sorted.

    Raises:
        FolderFailed: the storage cannot list the folder, even after retries.
    """
    folder = checkpoints_dir(run_dir, non_persistent)
    if isinstance(folder, Url):
        with failure_named(folder):
            return [*objects.named(folder)]
    return [*listed(folder, "step_????????")]


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return everything in a folder whose name matches, sorted; empty if the folder does not exist. Unlike `Path.glob`
    it does not take an unreadable folder for an empty one. Raises FolderFailed."""
    with failure_named(folder):
        try:
            found = patiently(lambda: os.listdir(folder), folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return [folder / name for name in sorted(found) if fnmatchcase(name, pattern)]


def complete(run_dir: Place, non_persistent: bool = False) -> list[Place]:
    """Return complete checkpoints of one kind, oldest first. Raises FolderFailed."""
    folder = checkpoints_dir(run_dir, non_persistent)
    if isinstance(folder, Url):
        with failure_named(folder):
            return [*objects.complete(folder)]
    return [found for found in named(run_dir, non_persistent) if is_complete(found)]


def newest(run_dir: Place) -> Place | None:
    """Return the newest complete checkpoint, or None; the persistent one at equal steps. Raises FolderFailed."""
    # The name is the step; max returns the first of equals.
    return max([*complete(run_dir), *complete(run_dir, True)], key=lambda folder: folder.name, default=None)


def newest_first(run_dir: Place) -> list[Place]:
    """Return all folders named as checkpoints, newest first, persistent ones before others. Raises FolderFailed."""
    found = [path for kind in (False, True) for path in named(run_dir, kind)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest_readable(run_dir: Place) -> tuple[Place | None, list[str]]:
    """Return the checkpoint for `checkpoint.resume=auto`, without reading tensors, and the damage of later ones.

    Raises:
        UserError: all are damaged.
    """
    passed_over: list[DamagedCheckpoint] = []
    for folder in newest_first(run_dir):
        try:
            require_complete(folder)
            read_record(folder)
            require_files(folder)
        except DamagedCheckpoint as error:
            passed_over.append(error)
            continue
        return folder, [str(error).removesuffix(REMEDY) for error in passed_over]
    if passed_over:
        raise all_damaged(run_dir, key_of(run_dir), passed_over)
    return None, []


def _newest_of_whole(run_dir: Place, key: str) -> Place | None:
    """Return the newest complete checkpoint, if no later one is incomplete. Runs never leave one: they rename at the
    end.

    Raises:
        UserError: there is one, such as a partial copy; with `key`.
    """
    found = newest(run_dir)
    after = found.name if found is not None else ""
    there = (path for kind in (False, True) for path in named(run_dir, kind))
    spoilt = sorted((path for path in there if path.name > after and not is_complete(path)), key=str)
    for path in spoilt:
        require_own_format(path, f"{key}: ")
    if spoilt:
        raise UserError(
            f"{key}: {', '.join(map(str, spoilt))}: no complete checkpoint, there is no {COMPLETE} in it, but later "
            f"than {found or 'the start of the run'}: copy what is missing, or remove it to use that one"
        )
    return found


def chosen(run_dir: Place, resume: str) -> Place | None:
    """Return the checkpoint in the checkpoint's or run's folder that `checkpoint.resume` names; None for `never`.

    Raises:
        UserError: the folder has no complete checkpoint, or a later incomplete one; or see `require_none_later`.
    """
    found = None if resume == "never" else in_folder(place_of(resume), "checkpoint.resume")
    require_none_later(run_dir, found)
    return found


def require_none_later(run_dir: Place, start: Place | None) -> None:
    """Require that `run_dir` has no later checkpoints than the start.

    The next start with `checkpoint.resume=auto` would take them, and `checkpoint.keep` would keep them instead of this
    run's.

    Args:
        start: the checkpoint that a run in `run_dir` starts from; None for a new run.

    Raises:
        UserError: there are later checkpoints, or an incomplete one.
    """
    found = _newest_of_whole(run_dir, "checkpoint.resume")
    if found is None or found == start:
        return
    step = read_record(start, "step")["step"] if start is not None else 0
    if step_in(found) > step:
        raise UserError(
            f"checkpoint.resume: {found} is of a later step than {step}, at which this run begins: "
            f"checkpoint.resume=auto continues from it; to begin there, give another {key_of(run_dir)}, or remove the "
            "later ones"
        )


def in_folder(folder: Place, key: str) -> Place:
    """Return the checkpoint that the value of `key` names: a checkpoint's folder, or the newest in a run's folder.

    Raises:
        UserError: the folder has no complete checkpoint, or a later incomplete one.
    """
    if isinstance(folder, Url) and folder.scheme in WEB and not is_complete(folder):
        raise UserError(
            f"{key}: no complete checkpoint at {folder}: give the URL of a checkpoint itself, since a web server does "
            "not list what is in a run's folder"
        )
    found = folder if is_complete(folder) else _newest_of_whole(folder, key)
    if found is None:
        require_own_format(folder, f"{key}: ")
        raise UserError(f"{key}: no complete checkpoint in {folder}: give the folder of a run or of a checkpoint")
    return found


def is_complete(folder: Place) -> bool:
    """True if a folder has the marker of a complete checkpoint. `Path.is_file` could return False after any error.

    Raises:
        FolderFailed: the storage does not answer.
    """

    def look() -> bool:
        if isinstance(folder, Url):
            return objects.is_there(folder / COMPLETE)
        try:
            return stat.S_ISREG((folder / COMPLETE).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    try:
        return patiently(look, folder / COMPLETE)
    except OSError as error:
        raise unreadable(folder, error) from error


def require_complete(folder: Place) -> None:
    """Require the marker of a complete checkpoint.

    Raises:
        DamagedCheckpoint: the marker is missing.
        UserError: another program or an earlier version wrote it; or the storage does not answer.
    """
    if not is_complete(folder):
        require_own_format(folder)
        raise damaged(folder, f"{COMPLETE} is missing, as in one that was copied in part: copy what is missing")


def require_files(folder: Place) -> None:
    """Check the index and every file of a complete checkpoint, without reading tensors.

    Raises:
        DamagedCheckpoint: one is missing, or its size or header is not what was written.
        UserError: the file system fails, even after retries.
    """
    with damage_named(folder):
        Reader(folder).require_files()


def read_record(folder: Place, *needed: str) -> dict[str, Any]:
    """Return the record of a complete checkpoint.

    Raises:
        DamagedCheckpoint: it is not what was written, lacks a key, or has another step than the folder's name.
        UserError: the file system fails, even after retries.
    """
    try:
        record = json.loads(marked_file(folder, RECORD))
    except OSError as error:
        raise unreadable(folder, error) from error
    except (ValueError, RecursionError) as error:
        raise damaged(folder, f"{RECORD} cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise damaged(folder, f"{RECORD} holds no record, but {type(record).__name__}")
    step, named = record.get("step"), objects.STEP.fullmatch(folder.name)
    if named and step is not None and step != int(named[1]):
        raise damaged(folder, f"it is named as of step {int(named[1])}, and its {RECORD} is of step {step}")
    lacking = [key for key in needed if key not in record]
    if lacking:
        raise damaged(folder, f"{RECORD} has no {', '.join(lacking)}")
    return record


def recorded_layout(layout: RunLayout) -> dict[str, list[int]]:
    """Return a run's layout as a record has it."""
    return {name: [getattr(module, size) for size in LAYOUT] for name, module in layout.modules.items()}


def record_text(record: dict[str, Any]) -> bytes:
    """Return the record's file content."""
    return json.dumps(record, indent=1).encode()


def require_seen(folder: Place, key: str) -> None:
    """Raise UserError with `key` if this rank does not see the complete checkpoint that rank 0 has chosen."""
    if not is_complete(folder):
        where = "all ranks need the same storage, endpoint and credentials"
        if not isinstance(folder, Url):
            where = "it must be on a file system that all nodes see"
        raise UserError(f"{key}: a rank does not find {folder}, which rank 0 has chosen: {where}")


def key_of(run_dir: Place) -> str:
    """Return the config key of a folder of checkpoints."""
    return "checkpoint.dir" if isinstance(run_dir, Url) else "run.dir"


def base_of(folder: Place, given: str = "") -> Place | None:
    """Return the checkpoint with the weights that `folder` leaves out; None if there are none, or they come from the
    seed.

    Args:
        given: `checkpoint.weights` of this run; overrides that of the run that wrote the checkpoint.

    Raises:
        UserError: it does not exist any more.
    """
    record = read_record(folder, "config")
    if LEFT_OUT not in record:
        return None
    weights = given or record["config"]["checkpoint"]["weights"]
    if not weights:
        return None
    found = in_folder(place_of(weights), "checkpoint.weights")
    if found.resolve() == folder.resolve():
        raise UserError(
            f"checkpoint.weights: {found} has trained weights only, and cannot be its own base: give the weights that "
            "its run began with"
        )
    return found
