"""Shards as tar files: the offsets of members, and writing.

`tarfile` reads the headers. It stops silently at a damaged one, so the bytes behind the last member are checked here.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from data.errors import DataError, ShardError
from data.storage.files import RangeFile, ReadRange, replacing
from data.text_format import shown

_BLOCK = tarfile.BLOCKSIZE
_END = 2 * _BLOCK  # bytes of zeros that end a tar


def walk_tar(path: object, read: ReadRange, size: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, bytes) of every regular member of the uncompressed tar `path` of `size` bytes.

    Raises:
        ShardError: the tar is empty, truncated, damaged or compressed, or a member is a link, a sparse file, a device
            or a FIFO. The message has shard, byte and member.
    """
    if not size:
        raise ShardError(f"{path}: the file is empty (0 bytes). Write or copy it again.")
    try:
        tar = tarfile.TarFile(
            fileobj=io.BufferedReader(RangeFile(read, size)), encoding="utf-8", errors="surrogateescape"
        )
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # of a million members it would take a gigabyte
            end, at = member.offset_data + member.size, f"member {shown(member.name)!r} at byte {member.offset}"
            if member.size < 0:
                raise ShardError(f"{path}: {at}: its length is negative ({member.size}). Write the shard again.")
            if member.issparse() or not (member.isreg() or member.isdir() or member.type == b"V"):
                raise ShardError(
                    f"{path}: {at} is a link, a device, a FIFO, a sparse file or of an unknown type "
                    f"({member.type.decode('latin-1')!r}). Write the shard again, of plain files."
                )
            if end > size and member.isreg():
                raise ShardError(
                    f"{path}: truncated at {size} bytes: {end - size} bytes of member {shown(member.name)!r} are "
                    "missing. Copy or write the shard again."
                )
            if member.isreg():
                yield member.name, member.offset_data, member.size
            if tar.offset > size:  # truncated within the zeros behind a member
                break
    except DataError:
        raise
    except (tarfile.TarError, OverflowError, OSError, ValueError, LookupError, RecursionError) as error:
        raise ShardError(
            f"{path}: not a readable uncompressed tar of {size} bytes ({error}). Copy or write the shard again; "
            "`mimo-train shards build` makes shards of other files."
        ) from error
    _require_end(path, read, tar.offset, size)


def _require_end(path: object, read: ReadRange, end: int, size: int) -> None:
    """Raise ShardError unless only zeros, and enough of them, follow byte `end`."""
    zeros = 0
    while chunk := read(max(min(1 << 20, size - end - zeros), 0), end + zeros):
        filled = len(chunk.lstrip(b"\0"))
        if filled and size - end >= _BLOCK:
            at = end + zeros + len(chunk) - filled
            raise ShardError(
                f"{path}: damaged header at byte {end} of {size} bytes (no end mark; data at byte {at}): the samples "
                "behind it cannot be read. Copy or write the shard again."
            )
        zeros += len(chunk)
    if zeros < _END:  # or truncated within a header
        raise ShardError(
            f"{path}: truncated at {size} bytes: a tar ends in {_END} zero bytes, this one in {zeros}. Samples may be "
            "missing; copy or write the shard again."
        )


def write_shard(path: Path, samples: Iterable[Sequence[tuple[str, bytes]]]) -> None:
    """Write a WebDataset tar of samples, each a list of (extension, content). Keys are numbers from 0.

    The file appears when it is complete. Times and owners are fixed, so equal samples give equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # webdataset's writer sorts members, which may be in the order of their placeholders, and drops names with "_".
    with replacing(path, buffer=1 << 20) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for row, members in enumerate(samples):
            for extension, content in members:
                info = tarfile.TarInfo(f"{row:06d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def tar_bytes(size: int) -> int:
    """Return the bytes that a member of `size` bytes takes in a shard, if its name is short and ASCII."""
    return 512 + size + -size % 512
