"""The members of a tar, in order, and a check that it was read to its end."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data.errors import ShardError

_BLOCK = 512  # bytes: headers and contents of members begin at multiples of it
_END = 2 * _BLOCK  # bytes of zeros that end a tar


def forget_members(tar: tarfile.TarFile) -> None:
    """Drop the entries of the members that were read or written so far: `tarfile` would keep every one."""
    tar.members.clear()  # type: ignore[attr-defined]  # there, but not in the standard library's stubs


def walk_tar(path: Path, file: io.BufferedReader, size: int) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of every regular member of the uncompressed tar `path`, open as `file`, of `size` bytes.

    `tarfile` stops silently at a damaged header, so the bytes after the last member are checked at the end.

    Raises:
        ShardError: the tar is empty, truncated, damaged or compressed, or has sparse members; the message has the byte.
    """
    if size == 0:
        raise ShardError(f"{path}: the file is empty (0 bytes). Write or copy it again.")
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            while (info := tar.next()) is not None:
                forget_members(tar)
                if info.issparse():
                    raise ShardError(
                        f"{path}: member {info.name!r} is a sparse file; write the shard again without them"
                    )
                if info.offset_data + info.size > size:
                    missing = info.offset_data + info.size - size
                    raise ShardError(
                        f"{path}: truncated at {size} bytes: {missing} bytes of member {info.name!r} are missing. Copy "
                        "or write the shard again."
                    )
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK if info.isreg() else tar.offset
                if info.isreg():
                    yield info.name, info.offset_data, info.size
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ShardError(
            f"{path}: not a readable uncompressed tar of {size} bytes ({error}; last whole member ends at byte {end}). "
            "Copy or write the shard again."
        ) from error
    _require_end(path, file, end, size)


def _require_end(path: Path, file: io.BufferedReader, end: int, size: int) -> None:
    """Raises ShardError unless nothing but zeros, and enough of them, follow byte `end`."""
    zeros = 0
    while zeros < size - end:
        chunk = os.pread(file.fileno(), 1 << 20, end + zeros)
        if not chunk:
            break
        filled = len(chunk.lstrip(b"\0"))
        if filled and size - end >= _BLOCK:
            at = end + zeros + len(chunk) - filled
            raise ShardError(
                f"{path}: damaged header at byte {end} of {size} (no end mark; data at byte {at}): the samples behind "
                "it cannot be read. Copy or write the shard again."
            )
        zeros += len(chunk)
    if zeros < _END:  # or cut within a header
        raise ShardError(
            f"{path}: truncated at {size} bytes: a tar ends in {_END} zero bytes, this one in {zeros}. Samples may be "
            "missing; copy or write the shard again."
        )
