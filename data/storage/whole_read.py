"""Reads of any size: Linux gives at most 2 GiB less 4 KiB at one call, and fewer when a signal comes."""

from __future__ import annotations

import os


def pread_all(fd: int, size: int, offset: int) -> bytes:
    """`size` bytes of an open file at `offset`; fewer only where the file ends. Raises OSError."""
    first = os.pread(fd, size, offset)
    if len(first) == size or not first:
        return first
    pieces, got = [first], len(first)
    while got < size and (more := os.pread(fd, size - got, offset + got)):
        pieces.append(more)
        got += len(more)
    return b"".join(pieces)
