"""Boxes of ISO media files (ISO/IEC 14496-12): MP4, MOV and HEIC are made of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

ReadAt = Callable[[int, int], bytes]
"""(offset within the file, length) -> bytes, shorter at the file's end."""

_MOST = 1 << 16  # boxes of one level: files of nothing else have millions


class Box(NamedTuple):
    """A box of a file."""

    name: bytes
    start: int
    """Where its content begins."""
    end: int
    """Behind its content."""


def boxes_of_file(read: ReadAt, size: int) -> Iterator[Box] | None:
    """The boxes of the highest level; None where the file ends inside of one, or what follows is none."""
    found = list(_boxes(read, 0, size))
    return iter(found) if found and found[-1].end == size else None


def boxes_in(raw: bytes, start: int = 0, end: int | None = None) -> Iterator[Box]:
    """The boxes inside of one that is in memory, up to one that is damaged."""
    return _boxes(lambda at, length: raw[at : at + length], start, len(raw) if end is None else min(end, len(raw)))


def _boxes(read: ReadAt, start: int, end: int) -> Iterator[Box]:
    for _ in range(_MOST):
        head = read(start, 16) if start + 8 <= end else b""
        if len(head) < 8:
            return
        length, name, at = int.from_bytes(head[:4], "big"), head[4:8], 8
        if length == 1:
            length, at = int.from_bytes(head[8:16], "big"), 16
        elif length == 0:  # up to the end
            length = end - start
        if length < at or start + length > end:
            return
        yield Box(name, start + at, start + length)
        start += length


def child(raw: bytes, *names: bytes, start: int = 0, end: int | None = None) -> Box | None:
    """The first box of a path of names inside of bytes in memory; None where there is none."""
    found = None
    for name in names:
        found = next((box for box in boxes_in(raw, start, end) if box.name == name), None)
        if found is None:
            return None
        start, end = found.start, found.end
    return found


def number(raw: bytes, at: int, length: int = 4) -> int:
    """A whole number at a place; 0 behind the end."""
    return int.from_bytes(raw[at : at + length], "big")
