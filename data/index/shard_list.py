"""Where the parts of shards are, in files that have parts of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.index.named import Named


@dataclass
class Found[File: Named]:
    """Of shards, by their numbers.

    Attributes:
        files: those that have a part.
        file: int32 [shards], which of `files`; -1: none has a part of it.
        row: int64 [shards], in its `table`.
    """

    files: list[File]
    file: np.ndarray
    row: np.ndarray

    @classmethod
    def of_none(cls, shards: int) -> Found[File]:
        """No parts of so many shards."""
        return cls([], np.full(shards, -1, dtype=np.int32), np.full(shards, -1, dtype=np.int64))

    @property
    def missing(self) -> np.ndarray:
        """bool [shards]: which have no part."""
        return self.file < 0

    def take(self, file: File, rows: np.ndarray, which: np.ndarray) -> None:
        """Parts of a file, at `rows` [shards], of the shards that `which` names, int64."""
        if len(which):
            self.file[which], self.row[which] = len(self.files), rows[which]
            self.files.append(file)

    def add(self, other: Found[File], numbers: Sequence[int]) -> None:
        """What another has of shards that have the `numbers` here."""
        of = np.asarray(numbers)
        self.file[of] = np.where(other.missing, -1, other.file + len(self.files))
        self.row[of] = other.row
        self.files += other.files
