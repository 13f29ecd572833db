"""The launcher's folder for temporary files, removed at its end, or by a later launcher if it was killed. Imports no
torch."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "mimo-train-", "lock"

FLIGHT = "flight"
"""File in the folder, in which the ranks leave where their flight recorder files are."""
SCRATCH = "MIMO_SCRATCH"
"""Environment variable of the ranks: the folder."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that exists until the end of the block; the ranks know it by SCRATCH. Those of launchers that have been
    killed are removed."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Locked before it has its name: whoever looks must not find it free.
    lock = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # without locks the folder of a killed launcher stays
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{LOCK}.new").rename(folder / LOCK)
        os.environ[SCRATCH] = str(folder)
        yield folder
    finally:
        os.environ.pop(SCRATCH, None)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    """Folders of this user whose lock nobody holds; the system frees it when a launcher ends in whatever way."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
