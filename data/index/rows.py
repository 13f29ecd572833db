"""Rows of a catalogue, many at once and of any shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.index.file import CatalogueFile
from data.index.shard_index import MEMBER, SAMPLE


class Rows:
    """Rows of a catalogue, taken together.

    Attributes:
        samples: [rows] `SAMPLE`; `first_member` counts from the first of these rows.
        firsts: int64 [rows + 1], the first member of each among `members`.
        members: [members] `MEMBER`; `code` is one of `names`.
        names, kinds: of codes.
    """

    def __init__(
        self,
        opened: Sequence[CatalogueFile],
        of_shards: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        rows: np.ndarray,
    ) -> None:
        """
        Args:
            of_shards: of the shard of each row: its number in `opened`, its row in the table there, the first byte of
                its part, its samples.
            rows: int64, in their shards.
        """
        self.names, self.kinds, bases = list[str](), list[str](), dict[tuple[int, int], int]()
        numbers = np.zeros(len(rows), dtype=np.int64)
        found = []
        files, numbers_there, bytes_there, counts = of_shards
        for number, file in enumerate(opened):
            own = np.flatnonzero(files == number)
            if not len(own):
                continue
            starts = bytes_there[own] // 8
            at = starts + rows[own] * (SAMPLE.itemsize // 8)
            first = file.words[at]
            numbers[own] = file.words[at + SAMPLE.itemsize // 8] - first
            members = starts + (counts[own] + 1) * (SAMPLE.itemsize // 8)
            members += first * (MEMBER.itemsize // 8)
            codes = file.table["codes"][numbers_there[own]]
            for one in np.unique(codes).tolist():
                bases[number, one] = len(self.names)
                self.names += file.codes[one].extensions
                self.kinds += file.codes[one].kinds
            base = np.array([bases.get((number, one), 0) for one in range(len(file.codes))], dtype=np.int64)
            found.append((own, file, file.words[at + 1], members, base[codes]))
        self.firsts = np.concatenate([[0], np.cumsum(numbers)])
        self.samples = np.zeros(len(rows), dtype=SAMPLE)
        words = np.empty((int(self.firsts[-1]), MEMBER.itemsize // 8), dtype="<i8")
        added = np.zeros(len(words), dtype=np.int32)
        for own, file, reasons, members, base in found:
            self.samples.view("<i8").reshape(-1, SAMPLE.itemsize // 8)[own, 1] = reasons
            to = _spread(self.firsts[own], numbers[own])
            taken = _spread(members, numbers[own], MEMBER.itemsize // 8)
            for column in range(words.shape[1]):
                words[to, column] = file.words[taken + column]
            added[to] = np.repeat(base, numbers[own])
        self.members = words.view(MEMBER).reshape(-1)
        self.members["code"] += added


def _spread(starts: np.ndarray, numbers: np.ndarray, step: int = 1) -> np.ndarray:
    """start, start + step, ... so many of each, one behind the other."""
    ends = np.cumsum(numbers)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - numbers, numbers)
    return np.repeat(starts, numbers) + step * within
