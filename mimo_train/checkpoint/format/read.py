"""Reading a checkpoint at any layout: only what is asked for, and nothing whose hash is another one."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch

from mimo_train.checkpoint.format.durable import digest
from mimo_train.checkpoint.format.files import INDEX, Damage, marked_file
from mimo_train.checkpoint.format.index import BLOCK, Index, Key, Piece
from mimo_train.checkpoint.format.spans import Span, common_range, copy_common
from mimo_train.checkpoint.format.write import require_size

KEPT = 16
"""Blocks that a reader keeps: neighbours of a small tensor are often read next."""


@dataclass(frozen=True)
class Wanted:
    """What is to be read of a tensor."""

    key: Key
    span: Span
    into: torch.Tensor
    """[span.numel], in the host's memory; values are cast to its dtype."""


class Reader:
    """The tensors of a complete checkpoint.

    Attributes:
        index: what is in it.

    Raises:
        Damage: it is not complete, or its index is not what was written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = Index.load(marked_file(folder, INDEX))
        self._open: dict[int, int] = {}
        self._opening = Lock()
        self._kept: OrderedDict[tuple[int, int], memoryview] = OrderedDict()

    def require_files(self) -> None:
        """Look at every file: for one rank of many, which together would open each file as often as there are files.

        Raises:
            Damage: one is missing, or its size or header is not what was written.
        """
        for file in self.index.files:
            require_size(self.folder, file)
            with open(self.folder / file.name, "rb") as there:
                if digest(there.read(file.header)) != file.hashes[0]:
                    raise Damage(f"{file.name} is damaged in its header")

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
            for part, values in self._values(one.key, piece, first, last):
                count = copy_common(one.span, one.into, part, values)
                copied[id(one)] = copied.get(id(one), 0) + count
        for _, one, *_ in jobs:
            if copied[id(one)] != one.span.numel:
                raise Damage(f"{' '.join(one.key)} has {copied[id(one)]} of {one.span.numel} elements")

    def whole(self, key: Key) -> torch.Tensor:
        """A whole tensor, in its dtype."""
        shape = self.index.shape(key)
        values = torch.empty(shape, dtype=self.index.dtypes[key])
        self.fill([Wanted(key, Span.of_whole(shape), values.view(-1))])
        return values

    def damage(self, workers: int = 4) -> list[str]:
        """Every block that has another hash, by file and tensors. Reads all of the checkpoint."""
        blocks = [
            (number, block) for number, file in enumerate(self.index.files) for block in range(len(file.hashes) - 1)
        ]
        with ThreadPoolExecutor(workers) as pool:
            return [said for said in pool.map(self._damage, blocks) if said]

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            with suppress(OSError):
                os.close(file)
        self._open.clear()
        self._kept.clear()

    def _damage(self, place: tuple[int, int]) -> str:
        try:
            self._read(*place)
        except Damage as error:
            return str(error)
        return ""

    def _values(self, key: Key, piece: Piece, first: int, last: int) -> Iterator[tuple[Span, torch.Tensor]]:
        """A range of a piece, as its blocks have it."""
        dtype = self.index.dtypes[key]
        base = piece.at - piece.span.start * dtype.itemsize
        begin, end = base + first * dtype.itemsize, base + last * dtype.itemsize
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            low, high = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
            data = self._block(piece.file, number)[low - number * BLOCK : high - number * BLOCK]
            part = piece.span.part((low - base) // dtype.itemsize, (high - base) // dtype.itemsize)
            yield part, torch.frombuffer(data, dtype=dtype)

    def _block(self, file: int, number: int) -> memoryview:
        place = file, number
        if place not in self._kept:
            self._kept[place] = self._read(file, number)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place]

    def _read(self, number: int, block: int) -> memoryview:
        """A block behind the header of a file, after its hash was compared."""
        file = self.index.files[number]
        with self._opening:
            if number not in self._open:
                self._open[number] = os.open(self.folder / file.name, os.O_RDONLY)
        begin = file.header + block * BLOCK
        view = memoryview(bytearray(min(BLOCK, file.size - begin)))
        done = 0
        while done < len(view):
            count = os.preadv(self._open[number], [view[done:]], begin + done)
            if not count:
                raise Damage(f"{file.name} was cut short while it was read")
            done += count
        if digest(view) != file.hashes[1 + block]:
            raise Damage(
                f"{file.name} is damaged between bytes {begin} and {begin + len(view)}: {self._held(number, block)}"
            )
        return view

    def _held(self, number: int, block: int) -> str:
        """The tensors that a block has parts of."""
        names = [
            f"{key.module} {key.name} ({key.state})"
            for key, pieces in self.index.pieces.items()
            for piece in pieces
            if piece.file == number
            and piece.at < (block + 1) * BLOCK
            and piece.at + piece.span.numel * self.index.dtypes[key].itemsize > block * BLOCK
        ]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
