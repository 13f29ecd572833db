"""Reading a checkpoint at any layout: only what is asked for, and nothing whose hash is another one."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mimo_train.checkpoint.format.blocks import Blocks
from mimo_train.checkpoint.format.dtypes import TYPES
from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.index import BLOCK, Key, Piece
from mimo_train.checkpoint.format.spans import Span, common_range, copy_common

KEPT = 16
"""Blocks that a reader keeps: neighbours of a small tensor are often read next."""


@dataclass(frozen=True)
class Wanted:
    """What is to be read of a tensor."""

    key: Key
    span: Span
    into: torch.Tensor
    """[span.numel], in the host's memory; values are cast to its dtype."""


class Reader(Blocks):
    """The tensors of a complete checkpoint.

    Raises:
        Damage: it is not complete, or its index is not what was written.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._kept: OrderedDict[tuple[int, int], memoryview] = OrderedDict()

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read into the given tensors.

        Raises:
            KeyError: a tensor is not in the checkpoint.
            Damage: a block that is needed has another hash; names file and tensor.
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
        copied: dict[int, int] = {}
        for piece, one, first, last in sorted(jobs, key=lambda job: (job[0].file, job[0].at)):
            for part, values in self._values(one, piece, first, last):
                count = part.numel if values is None else copy_common(one.span, one.into, part, values)
                copied[id(one)] = copied.get(id(one), 0) + count
        for _, one, *_ in jobs:
            if copied[id(one)] != one.span.numel:
                raise Damage(f"{' '.join(one.key)} has {copied[id(one)]} of {one.span.numel} elements")

    def whole(self, key: Key) -> torch.Tensor:
        """A whole tensor, in its dtype."""
        shape = self.index.shape(key)
        values = torch.empty(shape, dtype=TYPES[self.index.dtypes[key]])
        self.fill([Wanted(key, Span.of_whole(shape), values.view(-1))])
        return values

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._kept.clear()

    def _values(self, one: Wanted, piece: Piece, first: int, last: int) -> Iterator[tuple[Span, torch.Tensor | None]]:
        """A range of a piece, as its blocks have it: to be used before the next one. None for values that were read
        into their place."""
        dtype = TYPES[self.index.dtypes[one.key]]
        base = piece.at - piece.span.start * dtype.itemsize
        begin, end = base + first * dtype.itemsize, base + last * dtype.itemsize
        data_size = self.index.files[piece.file].size - self.index.files[piece.file].header
        in_order = one.span.box == piece.span.box and one.into.dtype == dtype and one.into.is_contiguous()
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            low, high = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
            part = piece.span.part((low - base) // dtype.itemsize, (high - base) // dtype.itemsize)
            is_whole = high - low == min(BLOCK, data_size - number * BLOCK)
            # One element counts as contiguous at any stride, and then has no view as bytes.
            if in_order and is_whole and part.numel > 1 and (piece.file, number) not in self._kept:
                into = one.into[part.start - one.span.start : part.stop - one.span.start]
                self.read(piece.file, number, memoryview(into.view(torch.uint8).numpy()))
                yield part, None
            else:
                data = self._block(piece.file, number)[low - number * BLOCK : high - number * BLOCK]
                yield part, torch.frombuffer(data, dtype=dtype)

    def _block(self, file: int, number: int) -> memoryview:
        place = file, number
        if place not in self._kept:
            # New memory costs more than what is read into it.
            used = self._kept.popitem(last=False)[1] if len(self._kept) == KEPT else None
            size = min(BLOCK, self.index.files[file].size - self.index.files[file].header - number * BLOCK)
            self._kept[place] = self.read(file, number, used if used is not None and len(used) == size else None)
        self._kept.move_to_end(place)
        return self._kept[place]
