"""Flat ranges of boxes of tensors, and their overlaps.

The distributed optimizer cuts a rank's parameters into flat ranges that ignore rows; tensor parallelism gives a rank a
box of a parameter. So a rank's shard of a parameter is a flat range of a box, and layouts meet where ranges overlap.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop`, in row-major order, of a box of a tensor."""

    shape: Sizes
    """Shape of the whole tensor."""
    offset: Sizes
    """Offset of the box in the tensor."""
    size: Sizes
    """Size of the box."""
    start: int
    stop: int

    @classmethod
    def of_whole(cls, shape: Sizes) -> "Span":
        """Return the span of a whole tensor."""
        return cls(shape, (0,) * len(shape), shape, 0, prod(shape))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    @property
    def box(self) -> tuple[Sizes, Sizes]:
        """Return offset and size of the box."""
        return self.offset, self.size

    def part(self, start: int, stop: int) -> "Span":
        """Return another range of the same box."""
        return replace(self, start=start, stop=stop)


@dataclass(frozen=True)
class _Block:
    """A box that is one range of a span's elements."""

    at: int
    """First element, counted in the span's box."""
    low: Sizes
    """First index in the whole tensor."""
    size: Sizes

    @property
    def high(self) -> Sizes:
        return tuple(low + size for low, size in zip(self.low, self.size, strict=True))

    def slices(self, low: Sizes, high: Sizes) -> tuple[slice, ...]:
        """Return the slices of a box of the tensor within this block."""
        return tuple(slice(a - mine, b - mine) for a, b, mine in zip(low, high, self.low, strict=True))

    def range_of(self, low: Sizes, high: Sizes) -> tuple[int, int]:
        """Return the first and last + 1 element of a box within this block, counted in the span's box."""
        first = last = 0
        for a, b, mine, size in zip(low, high, self.low, self.size, strict=True):
            first, last = first * size + a - mine, last * size + b - 1 - mine
        return self.at + first, self.at + last + 1


def common_range(wanted: Span, stored: Span) -> tuple[int, int] | None:
    """Return the shortest range of `stored` that covers its overlap with `wanted`; None if they are disjoint. Both are
    spans of one tensor."""
    if wanted.box == stored.box:
        first, last = max(wanted.start, stored.start), min(wanted.stop, stored.stop)
        return (first, last) if first < last else None
    ranges = [block.range_of(low, high) for _, block, low, high in _common_blocks(wanted, stored)]
    return (min(first for first, _ in ranges), max(last for _, last in ranges)) if ranges else None


def copy_common(wanted: Span, into: "torch.Tensor", stored: Span, values: "torch.Tensor") -> int:
    """Copy the elements that two spans of one tensor share; return their number.

    Args:
        into: [wanted.numel].
        values: [stored.numel].
    """
    if wanted.box == stored.box:
        first, last = max(wanted.start, stored.start), min(wanted.stop, stored.stop)
        if first >= last:
            return 0
        into[first - wanted.start : last - wanted.start] = values[first - stored.start : last - stored.start]
        return last - first
    copied = 0
    for mine, theirs, low, high in _common_blocks(wanted, stored):
        target = into[mine.at - wanted.start :][: prod(mine.size)].view(mine.size)
        source = values[theirs.at - stored.start :][: prod(theirs.size)].view(theirs.size)
        target[mine.slices(low, high)] = source[theirs.slices(low, high)]
        copied += prod(b - a for a, b in zip(low, high, strict=True))
    return copied


def _common_blocks(span: Span, other: Span) -> Iterator[tuple[_Block, _Block, Sizes, Sizes]]:
    """Yield every overlapping pair of blocks of two spans, with the first and last + 1 index of the overlap."""
    if _shared(span.offset, _ends(span), other.offset, _ends(other)) is None:
        return
    blocks = list(_blocks(other))
    for mine in _blocks(span):
        for theirs in blocks:
            shared = _shared(mine.low, mine.high, theirs.low, theirs.high)
            if shared is not None:
                yield mine, theirs, *shared


def _ends(span: Span) -> Sizes:
    return tuple(offset + size for offset, size in zip(span.offset, span.size, strict=True))


def _shared(low: Sizes, high: Sizes, other_low: Sizes, other_high: Sizes) -> tuple[Sizes, Sizes] | None:
    first = tuple(map(max, low, other_low))
    last = tuple(map(min, high, other_high))
    return (first, last) if all(a < b for a, b in zip(first, last, strict=True)) else None


def _blocks(span: Span) -> Iterator[_Block]:
    for at, place, size in _cut(span.size, span.start, span.stop):
        low = tuple(offset + inside for offset, inside in zip(span.offset, place, strict=True))
        yield _Block(at, low, size)


def _cut(size: Sizes, start: int, stop: int) -> Iterator[tuple[int, Sizes, Sizes]]:
    """Yield a range of a box as consecutive boxes (partial row, whole rows, partial row): at most 2 x dimensions - 1.
    Each is (first element, offset in the box, size)."""
    if start >= stop:
        return
    if len(size) <= 1:
        yield start, (start,) * len(size), (stop - start,) * len(size)
        return
    width = prod(size[1:])
    first, last = -(-start // width), stop // width
    if first > last:  # within one row
        yield from _in_row(size, last, start, stop)
        return
    if start < first * width:
        yield from _in_row(size, first - 1, start, first * width)
    if first < last:
        yield first * width, (first, *[0] * (len(size) - 1)), (last - first, *size[1:])
    if last * width < stop:
        yield from _in_row(size, last, last * width, stop)


def _in_row(size: Sizes, row: int, start: int, stop: int) -> Iterator[tuple[int, Sizes, Sizes]]:
    begin = row * prod(size[1:])
    for at, place, of in _cut(size[1:], start - begin, stop - begin):
        yield begin + at, (row, *place), (1, *of)
