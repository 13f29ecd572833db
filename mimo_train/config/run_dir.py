"""The folder of a run: whether it can be written, and which one is meant. Looked at before a run, made when it starts.
Imports no torch."""

import os
import tempfile
from pathlib import Path

from mimo_train.config.fault import ConfigError, Fault

KEY = "run.dir"


def folder_fault(folder: Path) -> Fault | None:
    """Why a run cannot write into `folder`, as far as it shows without making it; None if nothing is in the way."""
    standing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not standing.is_dir():
        what = f"is a link to {standing.readlink()}, and there is" if standing.is_symlink() else "is"
        return Fault(KEY, f"the folder {folder} cannot be made: {standing} {what} no folder; give another one")
    if not os.access(standing, os.W_OK | os.X_OK):
        return Fault(KEY, f"the folder {folder} cannot be written: no permission to write into {standing}; {_REMEDY}")
    try:
        _write_into(standing)  # permissions do not bind root, and are not all: a file system may take no files
    except OSError as error:
        return _refused(folder, error)
    return None


def make_folder(folder: Path) -> None:
    """Make the folder of a run, and write into it to see that it takes files.

    Raises:
        ConfigError: it cannot be made or written; with the reason that the operating system gives.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_into(folder)
    except OSError as error:
        raise ConfigError([_refused(folder, error)]) from error


def _write_into(folder: Path) -> None:
    """Make a file without a name, which leaves nothing."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def _refused(folder: Path, error: OSError) -> Fault:
    why = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return Fault(KEY, f"the folder {folder} cannot be written ({why}); {_REMEDY}")


def runs_within(folder: Path, files: str) -> str:
    """What a message says of a folder that is no run's, but has those of runs in it: their names, the newest first;
    empty where there are none.

    Args:
        files: pattern of a run's files, from its folder.
    """
    found = {folder / path.relative_to(folder).parts[0] for path in folder.glob(f"*/{files}")}
    newest = sorted(found, key=lambda run: (-run.stat().st_mtime, run))
    named = " or ".join(map(str, newest[:_NAMED]))
    more = f", or another of {len(newest)}" if len(newest) > _NAMED else ""
    return f"; there are runs in it: give {named}{more}" if found else ""


_NAMED = 3
_REMEDY = "give one that every rank can write"
