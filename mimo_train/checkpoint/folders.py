"""Folders of checkpoints: names, the newest complete one, removing old ones. Imports no torch."""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

from mimo_train.checkpoint.format.files import COMPLETE, Damage, marked_file, patiently
from mimo_train.config.fault import PeersError, UserError

_STEP = re.compile(r"step_(\d{8})")
"""Names of the folders; the newest is known by its name."""

RECORD = "run.json"
"""File in a checkpoint: the run's progress, config, layout and fingerprints."""


LAYOUT = ("first_rank", "tp", "cp", "dp", "pp", "vpp", "ep", "etp")
"""What a record has of a module's layout, in this order."""


_FORMATS = {
    (".metadata", "*.distcp", "common.pt"): "the format of torch.distributed.checkpoint",
    ("mp_rank_*/*.pt", "iter_*/mp_rank_*/*.pt"): "Megatron-LM's own format",
    ("*.pt", "*.pth", "*.ckpt"): "the format of torch.save",
}
"""Files that only checkpoints of other formats have."""


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not those that were written; made by `damaged`."""


class FolderFailed(UserError, OSError):
    """The file system does not say what a folder holds, or does not rename in it: no damage, so that nothing is moved,
    and no checkpoint is believed missing."""


def checkpoints_dir(run_dir: Path, non_persistent: bool = False) -> Path:
    """Folder of all checkpoints of a run, or of the non-persistent ones, of which only the newest is kept."""
    return run_dir / "checkpoints" / "non_persistent" if non_persistent else run_dir / "checkpoints"


def final_folder(run_dir: Path, step: int, non_persistent: bool = False) -> Path:
    """Folder of the complete checkpoint of one step."""
    return checkpoints_dir(run_dir, non_persistent) / f"step_{step:08d}"


def partial_folder(run_dir: Path, step: int, non_persistent: bool = False) -> Path:
    """Folder that a checkpoint is written into before it is complete and renamed."""
    return checkpoints_dir(run_dir, non_persistent) / f"step_{step:08d}.partial"


def run_of(folder: Path) -> Path | None:
    """The folder of the run that a checkpoint was written by; None if it was moved out of it."""
    return next((parent.parent for parent in folder.absolute().parents if parent.name == "checkpoints"), None)


def named(run_dir: Path, non_persistent: bool, pattern: str = "step_????????") -> list[Path]:
    """Everything of one kind whose name fits, sorted. (`Path.glob` takes a folder that it may not read for an empty
    one.)

    Raises:
        FolderFailed: the file system does not list the folder, also when it is asked again.
    """
    folder = checkpoints_dir(run_dir, non_persistent)
    with _failure_named(folder):
        try:
            found = patiently(lambda: os.listdir(folder), folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
    return [folder / name for name in sorted(found) if fnmatchcase(name, pattern)]


@contextmanager
def _failure_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderFailed(
            f"the checkpoints in {folder} cannot be looked at ({error}): an error of the file system or of this "
            "machine, or a missing permission: mend that, and start again"
        ) from error


def complete(run_dir: Path, non_persistent: bool = False) -> list[Path]:
    """Complete checkpoints of one kind, oldest first. Raises FolderFailed."""
    return [folder for folder in named(run_dir, non_persistent) if _is_complete(folder)]


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of either kind, or None; of two at one step, the persistent one. Raises
    FolderFailed."""
    # The name is the step: max takes the first of equal ones.
    return max([*complete(run_dir), *complete(run_dir, True)], key=lambda folder: folder.name, default=None)


def newest_first(run_dir: Path) -> list[Path]:
    """Everything that has the name of a checkpoint, complete or not, of either kind; of two at one step, the persistent
    one first. Raises FolderFailed."""
    found = [path for kind in (False, True) for path in named(run_dir, kind)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest_readable(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `checkpoint.resume=auto` continues from, as far as markers and records tell, and what is
    wrong with later ones, which a run sets aside.

    Raises:
        UserError: every one is damaged.
    """
    passed_over: list[DamagedCheckpoint] = []
    for folder in newest_first(run_dir):
        try:
            require_complete(folder)
            read_record(folder)
        except DamagedCheckpoint as error:
            passed_over.append(error)
            continue
        return folder, [str(error).removesuffix(_REMEDY) for error in passed_over]
    if passed_over:
        raise UserError("\n".join(map(str, passed_over)))
    return None, []


def set_aside(folder: Path) -> Path:
    """Give a damaged checkpoint a name that is none of a checkpoint; returns it. Nothing is removed, then or later.

    Raises:
        OSError: the folder cannot be renamed.
    """
    for number in count(1):
        aside = folder.with_name(f"{folder.name}.damaged{f'.{number}' if number > 1 else ''}")
        if not os.path.lexists(aside):
            folder.rename(aside)
            return aside
    raise AssertionError("unreachable")


def _newest_of_whole(run_dir: Path, key: str) -> Path | None:
    """The newest complete checkpoint, if none of a later step has lost its record. A run never leaves such a one: it
    writes under another name, and renames.

    Raises:
        UserError: there is one, such as a partial copy; with `key`.
    """
    found = newest(run_dir)
    after = found.name if found is not None else ""
    there = (path for kind in (False, True) for path in named(run_dir, kind))
    spoilt = sorted(path for path in there if path.name > after and not _is_complete(path))
    for path in spoilt:
        _require_own_format(path, f"{key}: ")
    if spoilt:
        raise UserError(
            f"{key}: {', '.join(map(str, spoilt))}: no complete checkpoint, there is no {COMPLETE} in it, but later "
            f"than {found or 'the start of the run'}: copy what is missing, or remove it to go on from there"
        )
    return found


def chosen(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that `checkpoint.resume` names: a checkpoint's folder or a run's folder; None for `never`.

    Raises:
        UserError: the folder holds no complete checkpoint, or a later one that is not; or `run_dir` holds later ones,
            see `require_none_later`.
    """
    found = None if resume == "never" else in_folder(Path(resume), "checkpoint.resume")
    require_none_later(run_dir, found)
    return found


def require_none_later(run_dir: Path, start: Path | None) -> None:
    """
    Args:
        start: the checkpoint that a run in `run_dir` starts from; None for a new run.

    Raises:
        UserError: `run_dir` holds checkpoints of later steps, of another run or of an earlier start of this one. The
            next start with `checkpoint.resume=auto` would take them, and `checkpoint.keep` would keep them instead of
            this run's. Or it holds one that is not complete.
    """
    found = _newest_of_whole(run_dir, "checkpoint.resume")
    if found is None or found == start:
        return
    step = read_record(start, "step")["step"] if start is not None else 0
    if found.name > final_folder(run_dir, step).name:
        raise UserError(
            f"checkpoint.resume: {found} is of a later step than {step}, at which this run begins: "
            "checkpoint.resume=auto continues from it; to begin there, give another run.dir, or remove the later ones"
        )


def in_folder(folder: Path, key: str) -> Path:
    """The checkpoint that the value of `key` names: a checkpoint's folder, or a run's folder, whose newest it is.

    Raises:
        UserError: the folder holds no complete checkpoint, or a later one that is not.
    """
    found = folder if _is_complete(folder) else _newest_of_whole(folder, key)
    if found is None:
        _require_own_format(folder, f"{key}: ")
        raise UserError(f"{key}: no complete checkpoint in {folder}: give the folder of a run or of a checkpoint")
    return found


_DAMAGED = " is damaged: "
_REMEDY = "; remove this folder, and checkpoint.resume=auto takes the newest that is left, or name another one"


def damaged(folder: Path, why: str) -> DamagedCheckpoint:
    """The error of a checkpoint whose files are not those that were written."""
    return DamagedCheckpoint(f"checkpoint {folder}{_DAMAGED}{why}{_REMEDY}")


def _unreadable(folder: Path, error: OSError) -> FolderFailed:
    return FolderFailed(
        f"checkpoint {folder} cannot be read ({error}): an error of the file system or of this machine, which says "
        "nothing about the checkpoint: mend that, and start again"
    )


def _is_complete(folder: Path) -> bool:
    """Whether a folder has the marker of a complete checkpoint. `Path.is_file` may say no after any error.

    Raises:
        UserError: the file system does not tell.
    """

    def look() -> bool:
        try:
            return stat.S_ISREG((folder / COMPLETE).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    try:
        return patiently(look, folder / COMPLETE)
    except OSError as error:
        raise _unreadable(folder, error) from error


def damage_in(folder: Path, error: UserError) -> str:
    """What is damaged in a checkpoint, if that is what an error says, of this rank or of another; else empty."""
    of_peer = isinstance(error, PeersError) and error.kind == DamagedCheckpoint.__name__
    start = f"checkpoint {folder}{_DAMAGED}"
    if not of_peer and not isinstance(error, DamagedCheckpoint) or not str(error).startswith(start):
        return ""
    return str(error).removeprefix(start).removesuffix(_REMEDY)


def require_complete(folder: Path) -> None:
    """
    Raises:
        DamagedCheckpoint: a folder that has the name of a checkpoint has no marker that it is complete.
        UserError: it is of another program, or of a version before this format; or the file system does not tell.
    """
    if not _is_complete(folder):
        _require_own_format(folder)
        raise damaged(folder, f"{COMPLETE} is missing, as in one that was copied in part: copy what is missing")


def _require_own_format(folder: Path, before: str = "") -> None:
    """Raises UserError, which begins with `before`, for a checkpoint of another program or of an earlier version:
    nothing is damaged in it, and copying or renaming it is of no use."""
    for names, program in _FORMATS.items():
        found = next((path for name in names for path in sorted(folder.glob(name))), None)
        if found is not None:
            raise UserError(
                f"{before}checkpoint {folder} is of {program} ({found.relative_to(folder)}), which is read by "
                "unpickling, and so not here: go on with the program that wrote it, or export it as a directory of "
                "transformers there and start from that (modules.NAME.pretrained)"
            )


def read_record(folder: Path, *needed: str) -> dict[str, Any]:
    """The record of a complete checkpoint.

    Args:
        needed: keys that it must have.

    Raises:
        DamagedCheckpoint: it is not what was written, lacks one of them, or is of another step than the folder is named
            after.
        UserError: the file system fails, also when it is tried again.
    """
    try:
        record = json.loads(marked_file(folder, RECORD))
    except OSError as error:
        raise _unreadable(folder, error) from error
    except (ValueError, RecursionError) as error:
        raise damaged(folder, f"{RECORD} cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise damaged(folder, f"{RECORD} holds no record, but {type(record).__name__}")
    step, named = record.get("step"), _STEP.fullmatch(folder.name)
    if named and step is not None and step != int(named[1]):
        raise damaged(folder, f"it is named as of step {int(named[1])}, and its {RECORD} is of step {step}")
    lacking = [key for key in needed if key not in record]
    if lacking:
        raise damaged(folder, f"{RECORD} has no {', '.join(lacking)}")
    return record


def record_text(record: dict[str, Any]) -> bytes:
    """The record as it is written."""
    return json.dumps(record, indent=1).encode()


def require_seen(folder: Path, key: str = "run.dir") -> None:
    """Raises UserError, with `key`, where this rank does not find a complete checkpoint that another one has found."""
    if not _is_complete(folder):
        raise UserError(
            f"{key}: a rank does not find {folder}, which rank 0 has chosen: it must be on a file system that "
            "all nodes see"
        )


def require_shared(partial: Path) -> None:
    """Raises UserError where a folder that rank 0 has just made is not there."""
    if not partial.is_dir():
        raise UserError(
            f"run.dir: {partial} was made by rank 0 and is not there for another rank: run.dir must be on a file "
            "system that all nodes see"
        )


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turns `Damage`, and errors of the file system, which are none, into errors that name the checkpoint and the
    remedy."""
    try:
        yield
    except (Damage, FileNotFoundError) as error:
        raise damaged(folder, str(error)) from error
    except FolderFailed:
        raise
    except OSError as error:
        raise _unreadable(folder, error) from error


def finish_renames(run_dir: Path) -> None:
    """Give complete checkpoints their names that a kill has left without: it came between the marker and the rename, or
    between the two renames that replace a folder. For the one process that writes into `run_dir`. Raises
    FolderFailed."""
    for kind in (False, True):
        for pattern in ("step_????????.partial", "step_????????.old.partial"):  # the new one first
            for found in named(run_dir, kind, pattern):
                final = found.with_name(found.name.partition(".")[0])
                if _is_complete(found) and not os.path.lexists(final):
                    with _failure_named(found.parent):
                        found.rename(final)


def remove_unfinished(run_dir: Path, non_persistent: bool = False) -> None:
    """Remove what earlier saves have not finished."""
    finish_renames(run_dir)
    for folder in named(run_dir, non_persistent, "*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_old(run_dir: Path, keep: int, non_persistent: bool = False, keep_every: int = 0) -> None:
    """Remove checkpoints beyond `keep`.

    Args:
        keep: number of complete checkpoints to keep; 0 keeps all. Of the non-persistent ones, one is kept.
        non_persistent: which of the two kinds.
        keep_every: steps of which every multiple is kept, beside the newest; 0: none.

    Raises:
        OSError: one cannot be removed.
    """
    keep, every = (1, 0) if non_persistent else (keep, keep_every)
    for folder in complete(run_dir, non_persistent)[:-keep] if keep else []:
        if every and int(folder.name.partition("_")[2]) % every == 0:
            continue
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint, or what there is of one; what cannot be removed is left and is none.

    Raises:
        OSError: it cannot be removed.
    """
    # The marker first: without it the folder is no checkpoint.
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
