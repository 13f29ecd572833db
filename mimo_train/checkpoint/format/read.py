"""Read a checkpoint at any layout: only the requested elements, with verified hashes."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from data.storage.url import Place
from mimo_train.checkpoint.format.blocks import Blocks
from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.index import BLOCK, SIZES, Key, Piece
from mimo_train.checkpoint.format.plain import TYPES
from mimo_train.checkpoint.format.spans import Span, common_range, copy_common

KEPT = 16
"""Blocks that a reader keeps: neighbours of a small tensor are often read next."""


@dataclass(frozen=True)
class Wanted:
    """A span of a tensor to read."""

    key: Key
    span: Span
    into: torch.Tensor
    """[span.numel], in host memory; values are cast to its dtype."""


class Reader(Blocks):
    """Reader of a complete checkpoint's tensors.

    Raises:
        Damage: it is incomplete, or its index is not what was written.
    """

    def __init__(self, folder: Place):
        super().__init__(folder)
        self._kept: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._aside = bytearray(BLOCK)

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read into the given tensors.

        Raises:
            KeyError: a tensor is not in the checkpoint.
            Damage: a needed block has another hash; names file and tensor.
        """
        jobs: list[tuple[Piece, Wanted, int, int]] = []
        for one in wanted:
            found = 0
            for piece in self.index.pieces[one.key]:
                common = common_range(one.span, piece.span)
                if common is not None:
                    jobs.append((piece, one, *common))
                    found += 1
            if not found and one.span.numel:
                raise Damage(f"{' '.join(one.key)} has no element of {one.span}")
        jobs.sort(key=lambda job: (job[0].file, job[0].at))
        uses: dict[tuple[int, int], list[_Use]] = {}
        for piece, one, first, last in jobs:
            for place, use in self._uses(one, piece, first, last):
                uses.setdefault(place, []).append(use)
        self.expect([place for place in uses if place not in self._kept])
        copied: dict[int, int] = {}
        for place, of_block in uses.items():
            for use, count in self._taken(place, of_block):
                copied[id(use.one)] = copied.get(id(use.one), 0) + count
        for _, one, *_ in jobs:
            if copied[id(one)] != one.span.numel:
                raise Damage(f"{' '.join(one.key)} has {copied[id(one)]} of {one.span.numel} elements")

    def whole(self, key: Key) -> torch.Tensor:
        """Return a whole tensor in its stored dtype."""
        shape = self.index.shape(key)
        values = torch.empty(shape, dtype=TYPES[self.index.dtypes[key]])
        self.fill([Wanted(key, Span.of_whole(shape), values.view(-1))])
        return values

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._kept.clear()

    def _uses(self, one: Wanted, piece: Piece, first: int, last: int) -> Iterator[tuple[tuple[int, int], "_Use"]]:
        """Yield what a range of a piece needs from each block."""
        dtype = TYPES[self.index.dtypes[one.key]]
        base, begin, end = self._ends(one.key, piece, first, last)
        in_order = one.span.box == piece.span.box and one.into.dtype == dtype and one.into.is_contiguous()
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            start = number * BLOCK
            low, high = max(begin, start), min(end, start + BLOCK)
            part = piece.span.part((low - base) // dtype.itemsize, (high - base) // dtype.itemsize)
            # A single element counts as contiguous at any stride, and then has no view as bytes.
            yield (piece.file, number), _Use(low - start, high - start, one, part, dtype, in_order and part.numel > 1)

    def _taken(self, place: tuple[int, int], uses: list["_Use"]) -> Iterator[tuple["_Use", int]]:
        """Read a block and copy the wanted parts; yield the number of elements of each."""
        size, at, views = self.size_of(*place), 0, list[memoryview]()
        uses.sort(key=lambda use: use.low)
        straight = sum(use.high - use.low for use in uses if use.is_straight)
        apart = all(one.high <= other.low for one, other in pairwise(uses))
        if place in self._kept or not apart or 2 * straight < size:
            data = self._block(place)
            yield from ((use, use.copy(data)) for use in uses)
            return
        # Read straight into the tensors; the rest of the block is discarded, since most of it has been used.
        aside = memoryview(self._aside)
        for use in uses:
            if use.is_straight:
                views += [aside[at : use.low], use.memory()]
                at = use.high
        views.append(aside[at:size])
        self.read(*place, [view for view in views if view])
        yield from ((use, use.part.numel if use.is_straight else use.copy(aside)) for use in uses)

    def _ends(self, key: Key, piece: Piece, first: int, last: int) -> tuple[int, int, int]:
        """Return byte offsets after the header: of the first element of a piece's box, and the ends of a range."""
        width = SIZES[self.index.dtypes[key]]
        base = piece.at - piece.span.start * width
        return base, base + first * width, base + last * width

    def _block(self, place: tuple[int, int]) -> memoryview:
        if place not in self._kept:
            # Reuse memory: allocating it costs more than the read.
            used = self._kept.popitem(last=False)[1] if len(self._kept) == KEPT else None
            size = self.size_of(*place)
            data = used if used is not None and len(used) == size else memoryview(bytearray(size))
            self.read(*place, [data])
            self._kept[place] = data
        self._kept.move_to_end(place)
        return self._kept[place]


@dataclass(frozen=True)
class _Use:
    low: int
    high: int
    """First and last + 1 of its bytes in the block."""
    one: Wanted
    part: Span
    dtype: torch.dtype
    is_straight: bool
    """True if the bytes are the tensor's, in its order."""

    def memory(self) -> memoryview:
        first = self.one.span.start
        into = self.one.into[self.part.start - first : self.part.stop - first]
        return memoryview(into.view(torch.uint8).numpy())

    def copy(self, data: memoryview) -> int:
        """Copy from the block's bytes; return the number of elements."""
        values = torch.frombuffer(data[self.low : self.high], dtype=self.dtype)
        return copy_common(self.one.span, self.one.into, self.part, values)
