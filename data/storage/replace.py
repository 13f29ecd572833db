"""Atomic replacement of a file, so that a reader or a crash never sees a partial one."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.errors import DataError


@contextmanager
def replacing(path: Path, mode: int | None = None, buffer: int = -1) -> Iterator[BinaryIO]:
    """A binary file to write; it takes the place of `path` when the block ends, and vanishes when the block raises.

    Threads, processes and machines may replace one path at the same time: each writes its own file with a random
    name beside it, and the last one to end stays.

    Args:
        mode: permissions of the file, such as 0o644; None: what the umask leaves of 0o666.
        buffer: bytes that are gathered for one write; -1: what Python has.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    file = temporary.open("xb", buffer)
    try:
        with file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cannot_write(what: str, path: Path, error: OSError) -> DataError:
    """The error of a file about shards, `what`, that cannot be written."""
    change = "set data.cache_dir to a folder that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        change = "free space there, or set data.cache_dir to a folder on another disk"
    return DataError(f"cannot write the {what} {path} ({error.strerror}): {change}")
