"""Full disks: room is looked for before a save, and a run that ends because its folder is full says so, whatever
library has found it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from data.storage.url import Place, Url
from mimo_train.config.errors import UserError

_CODES = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: BaseException, run_dir: Place) -> UserError | None:
    """What to raise instead of `error` where a full disk or a used-up quota is its cause; None where it is not, or
    the disk is another one."""
    found = why_full(error, run_dir)
    if not found:
        return None
    return UserError(
        f"run.dir: {run_dir} cannot take more files ({found}): free space, or lower checkpoint.keep, and the same "
        "command continues the run from its newest complete checkpoint; those are as they were"
    )


def why_full(error: BaseException, run_dir: Place) -> str:
    """The system's words where a full disk or a used-up quota of `run_dir` is the cause of an error; else empty."""
    return next((why for cause in _causes(error) if (why := _why(cause, run_dir))), "")


def require_room(folder: Path, nbytes: int) -> None:
    """Raises OSError where the file system of a folder has no room for so many bytes. One that does not say how large
    it is is believed to have."""
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < nbytes:
        sizes = f"a checkpoint takes {nbytes / 1e9:.3g} GB and {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder))


def _why(cause: BaseException, run_dir: Place) -> str:
    if not isinstance(cause, OSError) or cause.errno not in _CODES:
        return ""
    if isinstance(run_dir, Url):
        return ""
    file_name = cause.filename
    if isinstance(file_name, str) and not Path(file_name).absolute().is_relative_to(run_dir.absolute()):
        return ""
    return cause.strerror or os.strerror(cause.errno)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    # What has failed over data names its own folder, which may be on another disk.
    while cause is not None and id(cause) not in seen and not isinstance(cause, DataError):
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
