"""Find checkpoint folders (read only): names, completeness, the newest, and the base of trained-only checkpoints.

A `run_dir` is `run.dir` or `checkpoint.dir`: the folder or URL that contains `checkpoints`. Files in a checkpoint's
folder tell its state; on file systems and in object storage alike:

COMPLETE  it is complete; written last
PARTIAL   it is being written or removed; the next save removes it
DAMAGED   a run has set it aside; nothing removes it

A step that is saved again goes into `step_N.002`, next to the older one until that is removed.
"""

import json
import os
import re
import stat
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.storage.object_store import store_of
from data.storage.url import WEB, Place, Url, place_of
from mimo_train.checkpoint import best
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
from mimo_train.checkpoint.format.files import COMPLETE, PARTIAL, marked_file, objects_in, patiently
from mimo_train.checkpoint.format.read import Reader
from mimo_train.config.errors import UserError
from mimo_train.layout.ranks import RunLayout

DAMAGED = "DAMAGED"

STEP = re.compile(r"step_(\d{8})(?:\.(\d{3}))?")
"""Names of checkpoints: the step, and a number if it is not the step's first."""

RECORD = "run.json"
"""File in a checkpoint: the run's progress, config, layout and fingerprints."""

LEFT_OUT = "left_out"
"""Key of a record: the fingerprint of the weights that the checkpoint leaves out; missing if it has all."""

LAYOUT = ("first_rank", "tp", "cp", "dp", "pp", "vpp", "ep", "etp")
"""Fields of a module's layout in a record, in this order."""


@dataclass(frozen=True)
class Folder:
    """A folder that is named as a checkpoint."""

    path: Place
    names: Set[str]
    """Names of the files in it."""

    @property
    def is_set_aside(self) -> bool:
        """True if a run has found it damaged."""
        return DAMAGED in self.names

    @property
    def is_complete(self) -> bool:
        """True if it has the marker of a complete checkpoint and was not set aside."""
        return COMPLETE in self.names and not self.is_set_aside

    @property
    def is_unfinished(self) -> bool:
        """True during a write or removal, or after one that was killed."""
        return not self.names & {COMPLETE, DAMAGED} and (PARTIAL in self.names or not self.names)


def checkpoints_dir(run_dir: Place, non_persistent: bool = False) -> Place:
    """Return the folder of a run's checkpoints, or of the non-persistent ones, of which only the newest is kept."""
    return run_dir / "checkpoints" / "non_persistent" if non_persistent else run_dir / "checkpoints"


def step_folder(run_dir: Place, step: int, non_persistent: bool = False) -> Place:
    """Return the folder of the first checkpoint of a step."""
    return checkpoints_dir(run_dir, non_persistent) / f"step_{step:08d}"


def step_in(folder: Place) -> int:
    """Return the step in a checkpoint's name."""
    named = STEP.fullmatch(folder.name)
    assert named, folder
    return int(named[1])


def run_of(folder: Place) -> Place | None:
    """Return the folder of the run that wrote a checkpoint; None if it was moved elsewhere."""
    return next((parent.parent for parent in folder.absolute().parents if parent.name == "checkpoints"), None)


def every(run_dir: Place, non_persistent: bool = False) -> list[Folder]:
    """Return all folders of one kind that are named as a checkpoint, sorted by name; none if there is no such folder.

    Raises:
        FolderFailed: the storage cannot list them, even after retries; an unreadable folder is no empty one.
    """
    parent = checkpoints_dir(run_dir, non_persistent)
    with failure_named(parent):
        if isinstance(parent, Url):
            names: dict[Url, set[str]] = {}
            for item in store_of(parent).list(parent):
                names.setdefault(item.url.parent, set()).add(item.url.name)
            return [
                Folder(url, names[url]) for url in sorted(names) if url.parent == parent and STEP.fullmatch(url.name)
            ]
        folders = [parent / name for name in sorted(_names_in(parent)) if STEP.fullmatch(name)]
        return [Folder(folder, _names_in(folder)) for folder in folders if folder.is_dir()]


def contents(path: Place) -> Folder:
    """Return a folder with the names in it; none if it does not exist. Raises FolderFailed."""
    with failure_named(path):
        return Folder(path, objects_in(path).keys() if isinstance(path, Url) else _names_in(path))


def _names_in(folder: Path) -> set[str]:
    try:
        return set(patiently(lambda: os.listdir(folder), folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def complete(run_dir: Place, non_persistent: bool = False) -> list[Place]:
    """Return complete checkpoints of one kind, oldest first. Raises FolderFailed."""
    return [folder.path for folder in every(run_dir, non_persistent) if folder.is_complete]


def newest(run_dir: Place) -> Place | None:
    """Return the newest complete checkpoint, or None; the persistent one at equal steps. Raises FolderFailed."""
    # The name is the step; max returns the first of equals.
    return max([*complete(run_dir), *complete(run_dir, True)], key=lambda folder: folder.name, default=None)


def newest_first(run_dir: Place) -> list[Place]:
    """Return all folders that are neither unfinished nor set aside, newest first, persistent ones before others.
    Raises FolderFailed."""
    folders = [folder for kind in (False, True) for folder in every(run_dir, kind)]
    named = [folder.path for folder in folders if not folder.is_unfinished and not folder.is_set_aside]
    return sorted(named, key=lambda path: path.name, reverse=True)


def newest_readable(run_dir: Place) -> tuple[Place | None, list[str]]:
    """Return the checkpoint for `checkpoint.resume=auto`, without reading tensors, and the damage of later ones.

    Raises:
        UserError: all are damaged.
    """
    skipped: list[DamagedCheckpoint] = []
    for folder in newest_first(run_dir):
        try:
            require_complete(folder)
            read_record(folder)
            require_files(folder)
        except DamagedCheckpoint as error:
            skipped.append(error)
            continue
        return folder, [str(error).removesuffix(REMEDY) for error in skipped]
    if skipped:
        raise all_damaged(run_dir, key_of(run_dir), skipped)
    return None, []


def _newest_without_gap(run_dir: Place, key: str) -> Place | None:
    """Return the newest complete checkpoint. A later incomplete one that no run has left is an error.

    Raises:
        UserError: there is one, such as a partial copy; with `key`.
    """
    start = newest(run_dir)
    later = [path for path in newest_first(run_dir) if start is None or path.name > start.name]
    incomplete = sorted((path for path in later if not is_complete(path)), key=str)
    for path in incomplete:
        require_own_format(path, f"{key}: ")
    if incomplete:
        raise UserError(
            f"{key}: {', '.join(map(str, incomplete))}: no complete checkpoint, there is no {COMPLETE} in it, but "
            f"later than {start or 'the start of the run'}: copy what is missing, or remove it to use that one"
        )
    return start


def chosen(run_dir: Place, resume: str) -> Place | None:
    """Return the checkpoint in the checkpoint's or run's folder that `checkpoint.resume` names; None for `never`.

    Raises:
        UserError: the folder has no complete checkpoint, or a later incomplete one; or see `require_none_later`.
    """
    start = None if resume == "never" else in_folder(place_of(resume), "checkpoint.resume")
    require_none_later(run_dir, start)
    return start


def require_none_later(run_dir: Place, start: Place | None) -> None:
    """Require that `run_dir` has no later checkpoints than the start.

    The next start with `checkpoint.resume=auto` would take them, and `checkpoint.keep` would keep them instead of this
    run's.

    Args:
        start: the checkpoint that a run in `run_dir` starts from; None for a new run.

    Raises:
        UserError: there are later checkpoints, or an incomplete one.
    """
    latest = _newest_without_gap(run_dir, "checkpoint.resume")
    if latest is None or latest == start:
        return
    step = read_record(start, "step")["step"] if start is not None else 0
    if step_in(latest) > step:
        raise UserError(
            f"checkpoint.resume: {latest} is of a later step than {step}, at which this run begins: "
            f"checkpoint.resume=auto continues from it; to begin there, give another {key_of(run_dir)}, or remove the "
            "later ones"
        )


def in_folder(folder: Place, key: str) -> Place:
    """Return the checkpoint that the value of `key` names: a checkpoint's folder, the newest in a run's folder, or the
    best of a run (`RUN/checkpoints/best`).

    Raises:
        UserError: the folder has no complete checkpoint, or a later incomplete one.
    """
    if best.is_best(folder) and not is_complete(folder):  # a user may have a link of this name
        return best_of(folder, key)
    if isinstance(folder, Url) and folder.scheme in WEB and not is_complete(folder):
        raise UserError(
            f"{key}: no complete checkpoint at {folder}: give the URL of a checkpoint itself, since a web server does "
            "not list what is in a run's folder"
        )
    checkpoint = folder if is_complete(folder) else _newest_without_gap(folder, key)
    if checkpoint is None:
        require_own_format(folder, f"{key}: ")
        raise UserError(f"{key}: no complete checkpoint in {folder}: give the folder of a run or of a checkpoint")
    return checkpoint


def best_of(path: Place, key: str) -> Place:
    """Return the best complete checkpoint of a run; `path`: its `checkpoints/best`.

    Raises:
        UserError: there is no such file, or none of its checkpoints exists; with `key`.
    """
    steps = best.steps_in(path, key)
    run_dir = path.parent.parent
    if isinstance(path, Url) and path.scheme in WEB:  # which cannot be listed
        folders = [step_folder(run_dir, step) for step in steps]
        existing = {step_in(folder): folder for folder in folders if is_complete(folder)}
    else:
        existing = {step_in(folder): folder for folder in complete(run_dir)}
    for step in steps:
        if step in existing:
            return existing[step]
    raise UserError(f"{key}: none of the checkpoints in {path} exists (steps {', '.join(map(str, steps)) or 'none'})")


def is_complete(folder: Place) -> bool:
    """True if a folder has the marker of a complete checkpoint. `Path.is_file` could return False after any error.

    Raises:
        FolderFailed: the storage does not answer.
    """

    def look() -> bool:
        try:
            if isinstance(folder, Url):
                return bool(store_of(folder).look(folder / COMPLETE))
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
    step, named = record.get("step"), STEP.fullmatch(folder.name)
    if named and step is not None and step != int(named[1]):
        raise damaged(folder, f"its name has step {int(named[1])}, and its {RECORD} step {step}")
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


def base_of(folder: Place, weights_folder: str = "") -> Place | None:
    """Return the checkpoint with the weights that `folder` leaves out; None if there are none, or they come from the
    seed.

    Args:
        weights_folder: `checkpoint.weights` of this run; overrides that of the run that wrote the checkpoint.

    Raises:
        UserError: it does not exist any more.
    """
    record = read_record(folder, "config")
    if LEFT_OUT not in record:
        return None
    weights = weights_folder or record["config"]["checkpoint"]["weights"]
    if not weights:
        return None
    base = in_folder(place_of(weights), "checkpoint.weights")
    if base.resolve() == folder.resolve():
        raise UserError(
            f"checkpoint.weights: {base} has trained weights only, and cannot be its own base: give the weights that "
            "its run began with"
        )
    return base
