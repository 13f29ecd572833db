"""Writing shards: tars of plain members, by headers of our own, which take a third of the processor time of `tarfile`'s
(`benchmarks/shards_build.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from data.errors import DataError
from data.storage.replace import replacing

_BLOCK = 512
_END = 2 * _BLOCK
LONGEST_NAME = 100
"""Bytes of a member's name, in a header of ustar."""
_BUFFER = 1 << 20  # bytes written at once: the file system takes a quarter less time than for single members
_LARGEST = 8**11  # bytes of a member, in eleven octal digits


def write_shard(path: Path, samples: Iterable[Sequence[tuple[str, bytes]]], first: int = 0) -> None:
    """A tar of samples, each a list of (extension, content). Keys are numbers from `first` on. Times and owners are
    fixed, so that equal content gives equal bytes. The file appears when it is whole.

    Raises:
        DataError: a name above `LONGEST_NAME` bytes, or a member of 8 GiB or more.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, buffer=_BUFFER) as file:
        for row, members in enumerate(samples, first):
            for extension, content in members:
                file.write(_header(path, f"{row:06d}.{extension}", len(content)))
                file.write(content)
                file.write(bytes(-len(content) % _BLOCK))
        file.write(bytes(_END))


def tar_bytes(sizes: Iterable[int]) -> int:
    """What members of these sizes take in a shard."""
    return sum(_BLOCK + size + -size % _BLOCK for size in sizes)


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
    before = raw.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % size + b"00000000000\0"
    # The checksum counts its own field as eight blanks.
    total = sum(before) + 8 * ord(" ") + sum(_REST)
    return before + b"%06o\0 " % total + _REST


_REST = (b"0" + bytes(100) + b"ustar\x0000").ljust(_BLOCK - 156, b"\0")
"""Behind the checksum: the type, no link, the format."""
