"""Which content a shard has: a shard that is written over while a run reads it, or between two runs, has to show."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128

from data.errors import ShardError

_BLOCKS, _BLOCK = 32, 4096

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


@dataclass(frozen=True)
class ShardVersion:
    """What is known of a shard's content. Times are nanoseconds since the epoch.

    Whoever writes over a shard changes its modification time or can set it back, but never its change time. That one
    changes too where a shard is merely copied or gets other permissions: then the sample of its content decides.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    content: str
    """Hash of 32 blocks of 4 KiB, evenly over the shard: of all of it up to 128 KiB."""
    tag: str = ""
    """Of an object, another one for every content; it has no times here. Empty: a file."""

    @classmethod
    def of(cls, fd: int) -> ShardVersion:
        """That of an open file. Raises OSError."""
        found = os.fstat(fd)
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, content_hash(fd, found.st_size))

    def dated(self, found: os.stat_result) -> bool:
        """Whether the file has another size or modification time."""
        return (self.size, self.mtime_ns) != (found.st_size, found.st_mtime_ns)

    def confirmed(self, fd: int, found: os.stat_result) -> ShardVersion | None:
        """This version with the change time of `found`, which is the state of the open file `fd`; None if the file has
        another content. Raises OSError."""
        if self.dated(found):
            return None
        if found.st_ctime_ns == self.ctime_ns:
            return self
        if content_hash(fd, found.st_size) != self.content:
            return None
        return replace(self, ctime_ns=found.st_ctime_ns)


def content_hash(fd: int, size: int) -> str:
    """`ShardVersion.content` of an open file of `size` bytes. Raises OSError."""
    return hash_of(size, (os.pread(fd, length, at) for at, length in sampled(size)))


def sampled(size: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of the blocks that stand for the content of a shard of `size` bytes."""
    last = max(size - _BLOCK, 0)
    places = sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)})
    return [(at, min(_BLOCK, size - at)) for at in places]


def hash_of(size: int, blocks: Iterable[bytes | memoryview]) -> str:
    """`ShardVersion.content`, from the blocks of `sampled`."""
    digest = xxh3_128(str(size).encode())
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def require_file(path: Path, found: os.stat_result) -> None:
    """Raises ShardError for what is no regular file: to open a FIFO would wait for its writer, perhaps for ever."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise ShardError(f"{path}: is {kind}, not a file: a shard is a tar file")


def open_file(path: Path) -> int:
    """A descriptor to read a regular file with. Raises ShardError for anything else, OSError."""
    # Without O_NONBLOCK, to open what has become a FIFO meanwhile waits; files do not care.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd
