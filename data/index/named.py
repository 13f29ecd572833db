"""Rows of a file that each have the name of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from data.errors import DataError
from data.text_format import plural


class Named:
    """Names of rows.

    Attributes:
        names: of the shards, each of a row.
        number_of: the row of a name.
    """

    def __init__(self, names: Any, rows: int) -> None:
        """Raises DataError if these are not the names of so many shards."""
        if not are_texts(names) or len(names) != rows or len(set(names)) != rows:
            raise DataError(f"it has not the names of {plural(rows, 'shard')}")
        self.names: list[str] = names

    @cached_property
    def number_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def numbers_of(self, names: Sequence[str]) -> np.ndarray:
        """The rows of shards, int64; -1: there is none."""
        if names == self.names:
            return np.arange(len(names))
        return np.array([self.number_of.get(name, -1) for name in names], dtype=np.int64)


def are_texts(found: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(found, list) and all(isinstance(one, str) for one in found)
