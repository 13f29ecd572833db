"""Local files: retries, complete reads, atomic replacement, and the version of a shard.

An I/O error says nothing about a sample: the read is tried again, and then the run ends. Only what was read and cannot
be understood is a bad sample.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128

from data.errors import DataError, ReadError, ShardError

_log = logging.getLogger(__name__)

RETRIES = 5
"""Times that a read is tried again; the pauses take 15.5 seconds together."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds; each is twice the one before
_FINAL = frozenset(
    [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG]
)
"""Errors that no waiting changes."""
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 32, 4096
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def retrying[Result](work: Callable[[], Result], what: str, retries: int = RETRIES) -> Result:
    """Return the result of `work`, which is repeated up to `retries` times after an OSError.

    Args:
        what: for messages, with shard and byte: "PATH: cannot read 10 bytes at byte 20".

    Raises:
        ReadError: it failed each time, or for a reason that does not pass.
    """
    for tried in range(retries + 1):
        try:
            return work()
        except OSError as error:
            message = f"{what}: {_words(error)}"
            if error.errno in _FINAL:
                raise ReadError(message) from error
            if tried == retries:
                raise ReadError(
                    f"{message}; tried {tried + 1} times. It is an error of the storage or of this machine, not of a "
                    "sample: repair it and start again, or raise data.read_retries"
                ) from error
            pause = min(_FIRST_PAUSE * 2**tried, _LONGEST_PAUSE)
            _log.warning("%s; again in %g s (%d of %d)", message, pause, tried + 1, retries)
            time.sleep(pause)
    raise AssertionError(retries)


def _words(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error}{f' ({name})' if name else ''}"


def pread_all(fd: int, size: int, offset: int) -> bytes:
    """Read `size` bytes of an open file at `offset`; fewer only where the file ends. Raises OSError.

    Linux gives at most 2 GiB less 4 KiB at one call, and fewer when a signal comes.
    """
    content = os.pread(fd, size, offset)
    if len(content) == size:
        return content
    pieces, length = [content], len(content)
    while pieces[-1] and length < size:
        pieces.append(os.pread(fd, size - length, offset + length))
        length += len(pieces[-1])
    return b"".join(pieces)


@contextmanager
def replacing(path: Path, mode: int | None = None, buffer: int = -1) -> Iterator[BinaryIO]:
    """A binary file to write; it replaces `path` atomically when the block ends, and is removed when the block raises.

    Threads, processes and machines may replace one path at the same time: each writes its own file with a random
    name next to it, and the last one wins.

    Args:
        mode: permissions of the file, such as 0o644; None: what the umask leaves of 0o666.
        buffer: bytes that are gathered for one write; -1: Python's default.

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
    """Return the error of a file about shards, `what`, that cannot be written."""
    change = "set data.cache_dir to a folder that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        change = "free space there, or set data.cache_dir to a folder on another disk"
    return DataError(f"cannot write the {what} {path} ({error.strerror}): {change}")


@dataclass(frozen=True)
class ShardVersion:
    """The version of a shard's content. Times are nanoseconds since the epoch.

    Writing over a shard changes its modification time, which can be set back, and its change time, which cannot. The
    change time also changes when a shard is copied or gets other permissions: then the sample of its content decides.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    content: str
    """Hash of 32 blocks of 4 KiB, evenly over the shard: of all of it up to 128 KiB."""
    tag: str = ""
    """Of an object: differs for every content; it has no times here. Empty: a file."""

    @classmethod
    def of(cls, fd: int) -> ShardVersion:
        """Return the version of an open file. Raises OSError."""
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, _content_hash(fd, status.st_size))

    def confirmed(self, fd: int, status: os.stat_result) -> ShardVersion | None:
        """Return this version with the change time of `status`, the status of the open file `fd`; None if the file has
        another content. Raises OSError."""
        if (self.size, self.mtime_ns) != (status.st_size, status.st_mtime_ns):
            return None
        if status.st_ctime_ns == self.ctime_ns:
            return self
        if _content_hash(fd, status.st_size) != self.content:
            return None
        return replace(self, ctime_ns=status.st_ctime_ns)


def _content_hash(fd: int, size: int) -> str:
    return version_hash(size, (os.pread(fd, length, start) for start, length in sampled_blocks(size)))


def sampled_blocks(size: int) -> list[tuple[int, int]]:
    """Return (first byte, bytes) of the blocks that represent the content of a shard of `size` bytes."""
    last = max(size - _SAMPLED_BYTES, 0)
    starts = sorted({last * number // (_SAMPLED_BLOCKS - 1) for number in range(_SAMPLED_BLOCKS)})
    return [(start, min(_SAMPLED_BYTES, size - start)) for start in starts]


def version_hash(size: int, blocks: Iterable[bytes | memoryview]) -> str:
    """Return `ShardVersion.content` from the blocks of `sampled_blocks`."""
    digest = xxh3_128(str(size).encode())
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def require_file(path: Path, status: os.stat_result) -> None:
    """Raises ShardError for what is no regular file: opening a FIFO would wait for its writer, perhaps forever."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise ShardError(f"{path}: is {kind}, not a file: a shard is a tar file")


def open_file(path: Path) -> int:
    """Open a regular file for reading; returns the descriptor. Raises ShardError for anything else, OSError."""
    # Without O_NONBLOCK, opening what has become a FIFO meanwhile waits; it has no effect on files.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


class Reads:
    """The files that threads of this process are reading, for the report of a run that waits.

    Attributes:
        count: reads that have started or ended: it changes while data are read.
    """

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[int, tuple[float, str]] = {}

    @contextmanager
    def of(self, path: object) -> Iterator[None]:
        """A block that reads from `path`."""
        thread = threading.get_ident()
        before = self._open.get(thread)
        self._open[thread] = time.monotonic(), str(path)
        self.count += 1
        try:
            yield
        finally:
            self.count += 1
            if before is None:
                self._open.pop(thread, None)
            else:
                self._open[thread] = before

    def longest(self) -> str:
        """The path that a thread has been reading from for the longest time; empty if there is none."""
        reads = [*self._open.values()]
        return min(reads)[1] if reads else ""


READS = Reads()
"""The reads of this process."""


_BEGINNING = b"version https://git-lfs.github.com/spec/"

POINTER_ERROR = "is a Git-LFS pointer, not the file itself"
POINTER_REMEDY = "run `git lfs pull` in its folder, or download it again"


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a pointer. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
