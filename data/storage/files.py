"""Local files: retries, complete reads, atomic replacement, and the version of a shard.

An I/O error says nothing about a sample: the read is retried, then the run ends. Only content that was read and is
invalid makes a sample bad.
"""

from __future__ import annotations

import errno
import fcntl
import io
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
from typing import TYPE_CHECKING, BinaryIO

from xxhash import xxh3_128

from data.errors import ReadError, ShardError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_log = logging.getLogger(__name__)

RETRIES = 5
"""Retries of a read; the pauses take 15.5 seconds together."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds; each is twice the one before
_FINAL = frozenset(
    [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG]
)
"""Errors that waiting does not fix."""
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 32, 4096
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


ReadRange = Callable[[int, int], bytes]
"""(bytes, offset) -> content, fewer bytes at the end of the file."""


class RangeFile(io.RawIOBase):
    """A file of `size` bytes that `read` reads."""

    def __init__(self, read: ReadRange, size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        content = self._read(left if size < 0 else min(size, left), self._at)
        self._at += len(content)
        return content

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)


def retrying[Result](work: Callable[[], Result], what: str, retries: int = RETRIES) -> Result:
    """Return the result of `work`, retrying up to `retries` times after an OSError. `what` starts messages: "PATH:
    cannot read 10 bytes at byte 20". Raises ReadError if all tries fail, or for a permanent error."""
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
    """Read `size` bytes of an open file at `offset`; fewer only at the end of the file. Raises OSError. Linux returns
    at most 2 GiB less 4 KiB per call, and fewer after a signal."""
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
    """Yield a binary file that replaces `path` atomically when the block ends; if it raises, the file is removed.

    Concurrent writers use random names, and the last one wins. Raises OSError if the folder cannot be written.

    Args:
        mode: permissions, such as 0o644; None: 0o666 minus the umask.
        buffer: buffer size in bytes; -1: Python's default.
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


@dataclass(frozen=True)
class ShardVersion:
    """The version of a shard's content. Times are nanoseconds since the epoch.

    Overwriting a shard changes its modification time, which can be set back, and its change time, which cannot. Copies
    and permissions change the change time too; then the content sample decides.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    content: str
    """Hash of 32 evenly spaced blocks of 4 KiB; of everything up to 128 KiB."""
    tag: str = ""
    """Tag of an object, which changes with its content; objects have no times here. Empty for files."""

    @classmethod
    def of(cls, fd: int) -> ShardVersion:
        """Return the version of an open file. Raises OSError."""
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, _content_hash(fd, status.st_size))

    def confirmed(self, fd: int, status: os.stat_result) -> ShardVersion | None:
        """Return this version with the change time in `status` of `fd`; None for other content. Raises OSError."""
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
    """Return (first byte, bytes) of the blocks that represent a shard of `size` bytes."""
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
    """Raise ShardError unless it is a regular file: opening a FIFO could wait forever for its writer."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise ShardError(f"{path}: is {kind}, not a file: a shard is a tar file")


def open_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises ShardError for anything else, and OSError."""
    # O_NONBLOCK: the path may have become a FIFO. It has no effect on files.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


class Reads:
    """The files that this process's threads are reading, for the report of a run that waits. `count` changes whenever a
    read starts or ends."""

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[int, tuple[float, str]] = {}

    @contextmanager
    def of(self, path: object) -> Iterator[None]:
        """Mark the block as a read from `path`."""
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
        """Return the path of the longest running read; "" if there is none."""
        reads = [*self._open.values()]
        return min(reads)[1] if reads else ""


READS = Reads()


class Busy(Exception):
    """Another process has the lock."""


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file, which is removed at the end; nothing where files cannot be locked (some network file systems).
    Raises Busy if another process has it and `wait` is false."""
    with READS.of(path):  # a run continues when the process with the lock does
        fd = _locked(path, wait)
    try:
        yield
    finally:
        if fd is not None:
            path.unlink(missing_ok=True)
            os.close(fd)


_SECONDS_WITHOUT_WARNING = 2.0
"""The ranks of a node wait this long for one of them at every start."""


def _locked(path: Path, wait: bool) -> int | None:
    """Return the descriptor of a locked file; None where files cannot be locked."""
    began = time.monotonic()
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError:  # another user's, or the folder cannot be written
            return None
        is_mine = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.path.samestat(os.stat(path), os.fstat(fd))
        except BlockingIOError:
            if not wait:
                raise Busy from None
            if time.monotonic() - began < _SECONDS_WITHOUT_WARNING:
                time.sleep(0.02)
            else:
                _log.warning("%s: waiting for the process that has this lock", path)
                fcntl.flock(fd, fcntl.LOCK_EX)  # its owner removes the file: try again
        except FileNotFoundError:  # the owner removed it before
            pass
        except OSError:
            path.unlink(missing_ok=True)
            return None
        finally:
            if not is_mine:
                os.close(fd)
        if is_mine:
            return fd


_BEGINNING = b"version https://git-lfs.github.com/spec/"

POINTER_ERROR = "is a Git-LFS pointer, not the file itself"
POINTER_REMEDY = "run `git lfs pull` in its folder, or download it again"


def is_lfs_pointer(path: Path) -> bool:
    """True if a file is a Git-LFS pointer. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING
