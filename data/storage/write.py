"""Writing shards: tars of plain members, by headers of our own, which take a third of the processor time of `tarfile`'s
(`benchmarks/shards_build.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.errors import DataError
from data.storage.files import replacing

_BLOCK = 512
_END = 2 * _BLOCK
LONGEST_NAME = 100
"""Bytes of a member's name, in a header of ustar."""
_BUFFER = 1 << 20  # bytes of each write: the file system takes a tenth less time for such that begin at a multiple
_SMALL = 1 << 14  # bytes of a content that is put into the buffer with its padding
_LARGEST = 8**11  # bytes of a member, in eleven octal digits


def write_shard(path: Path, samples: Iterable[Sequence[tuple[str, bytes]]], first: int = 0) -> None:
    """A tar of samples, each a list of (extension, content). Keys are numbers from `first` on.

    Raises:
        DataError, OSError: as `shard_file`.
    """
    with shard_file(path) as shard:
        for row, members in enumerate(samples, first):
            for extension, content in members:
                shard.add(row, extension, content)


@contextmanager
def shard_file(path: Path) -> Iterator[ShardFile]:
    """A tar to write. The file appears when the block ends and it is whole; nothing stays when the block raises. Times
    and owners are fixed, so that equal content gives equal bytes.

    Raises:
        DataError: a name above `LONGEST_NAME` bytes, or a member of 8 GiB or more.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, buffer=0) as file:
        shard = ShardFile(path, file)
        yield shard
        shard.end()


class ShardFile:
    """A tar that `shard_file` writes: all of it goes through one buffer, into which files are read directly."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._buffer, self._filled = memoryview(bytearray(_BUFFER)), 0

    def add(self, row: int, extension: str, content: bytes) -> None:
        """A member of sample `row`."""
        size = len(content)
        self._put(_header(self._path, f"{row:06d}.{extension}", size))
        if size <= _SMALL:
            self._put(content.ljust(size + -size % _BLOCK, b"\0"))
            return
        self._put(content)
        self._put(_ZEROS[: -size % _BLOCK])

    def copy(self, row: int, extension: str, fd: int, offset: int, size: int) -> bool:
        """A member of sample `row`, the `size` bytes of an open file at `offset`; False: the file ends before, and the
        shard cannot be used."""
        self._put(_header(self._path, f"{row:06d}.{extension}", size))
        left = size
        while left:
            if self._filled == _BUFFER:
                self._write()
            got = os.preadv(fd, [self._buffer[self._filled : self._filled + left]], offset)
            if not got:
                return False
            self._filled += got
            offset += got
            left -= got
        self._put(_ZEROS[: -size % _BLOCK])
        return True

    def end(self) -> None:
        """Write the end of the tar, and what is left in the buffer."""
        self._put(bytes(_END))
        self._write()

    def _put(self, content: bytes) -> None:
        start, end = self._filled, self._filled + len(content)
        if end <= _BUFFER:
            self._buffer[start:end] = content
            self._filled = end
            return
        rest = memoryview(content)
        while rest:
            if self._filled == _BUFFER:
                self._write()
            piece = rest[: _BUFFER - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            rest = rest[len(piece) :]

    def _write(self) -> None:
        """Empty the buffer. The system may take less than all at one call."""
        done = 0
        while done < self._filled:
            done += self._file.write(self._buffer[done : self._filled])
        self._filled = 0


def tar_bytes(sizes: Iterable[int]) -> int:
    """What members of these sizes take in a shard."""
    return sum([_BLOCK + size + -size % _BLOCK for size in sizes])


def shard_bytes(of_samples: int) -> int:
    """Size of a shard whose samples take so many `tar_bytes`."""
    return of_samples + _END


def _header(path: Path, name: str, size: int) -> bytes:
    """A ustar header: name, permissions rw-r--r--, owner and group 0, size, time 0, checksum."""
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) > LONGEST_NAME:
        raise DataError(f"{path}: the member name {name!r} has {len(raw)} bytes, at most {LONGEST_NAME} are written")
    if size >= _LARGEST:
        raise DataError(f"{path}: member {name!r} has {size} bytes, at most {_LARGEST - 1} are written")
    digits = b"%011o" % size
    checksum = _CHECKSUM + sum(raw) + sum(digits)
    return b"%b%b%b%b%06o%b" % (raw.ljust(LONGEST_NAME, b"\0"), _OWNER, digits, _TIME, checksum, _REST)


_ZEROS = bytes(_BLOCK)
# What stands between a header's name, its size and its checksum, and behind that.
_OWNER = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"00000000000\0"
_REST = (b"\0 " + b"0" + bytes(100) + b"ustar\x0000").ljust(_BLOCK - 154, b"\0")
"""From the end of the checksum on: the type, no link, the format."""
_CHECKSUM = sum(_OWNER) + sum(_TIME) + sum(_REST[2:]) + 8 * ord(" ")
"""Of a header without name and size; its own field counts as eight blanks."""
