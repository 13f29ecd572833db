"""Sources of samples: the rows of each, and the order of all by the weights of a mixture.

The held-out rows depend only on the shard's content and the row, so adding or reordering shards moves no sample
between training and validation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from data.errors import DataError
from data.index.find_shards import Shards, find_shards
from data.order.mixture import Phase, Phases, whole_weights
from data.order.order import GlobalOrder, splitmix, splitmix_all
from data.records.members import Fields
from data.storage.url import Place
from data.text_format import plural


@dataclass(frozen=True)
class Source:
    """Shards that are mixed with others.

    name: for metrics and messages; shards: see `find_shards`; key: config key, for messages; weight: share relative to
    the sum of weights; None: its number of samples, so that all sources end with the epoch; fields: its `data.fields`;
    None: those of the dataset.
    """

    name: str
    shards: Shards
    key: str = "data.shards"
    weight: float | None = None
    fields: Fields | None = None


@dataclass(frozen=True)
class Part:
    """Rows [first, first + rows) of one source, without or with only `held`, ascending and relative to `first`."""

    first: int
    rows: int
    held: np.ndarray | None = None
    only_held: bool = False

    @property
    def size(self) -> int:
        """The number of rows."""
        if self.held is None:
            return self.rows
        return len(self.held) if self.only_held else self.rows - len(self.held)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the global rows at places below `size`."""
        if self.held is None:
            return self.first + places
        if self.only_held:
            return self.first + self.held[places]
        # held[j] - j kept rows precede the j-th held-out row.
        before = np.searchsorted(self.held - np.arange(len(self.held)), places, side="right")
        return self.first + places + before


class MixedOrder:
    """Order of one or several sources, with the interface of `GlobalOrder`. `size`: samples of all in an epoch."""

    def __init__(
        self, parts: Sequence[Part], phases: Sequence[Phase], seed: int = 0, shuffle: bool = True, block: int = 1
    ):
        """Make the order. Without `phases`, sizes are weights. See `GlobalOrder` for the other arguments."""
        self.parts, self.size = tuple(parts), sum(part.size for part in parts)
        self._seed, self._shuffle, self._block = seed, shuffle, block
        self._places = Phases(phases or [(0, whole_weights(self.sizes))], seed)
        # The first source has the same order as without the others.
        seeds = [seed + number * 0x9E3779B97F4A7C15 for number in range(len(parts))]
        self._orders = [
            GlobalOrder(part.size, part_seed, shuffle, block) for part, part_seed in zip(parts, seeds, strict=True)
        ]

    @property
    def sizes(self) -> list[int]:
        """The samples of each source."""
        return [part.size for part in self.parts]

    @property
    def phases(self) -> list[Phase]:
        """(first sample number, reduced weights), from the start on."""
        return self._places.phases

    def with_phases(self, phases: Sequence[Phase]) -> MixedOrder:
        """Return the same sources with other weights."""
        return MixedOrder(self.parts, phases, self._seed, self._shuffle, self._block)

    def row(self, number: int) -> int:
        """Return the global row of sample `number` (>= 0)."""
        return int(self.rows(np.array([number]))[0])

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return `row` of each of `numbers`, int64."""
        sources, items = self._places.items(numbers)
        rows = np.empty_like(items)
        for source in np.unique(sources).tolist():
            of_source = sources == source
            rows[of_source] = self.parts[source].at(self._orders[source].rows(items[of_source]))
        return rows

    def sources(self, numbers: np.ndarray) -> np.ndarray:
        """Return the source of each sample number, int64."""
        return self._places.items(numbers)[0]

    def counts(self, numbers: int) -> list[int]:
        """Return the samples of each source among the first `numbers`."""
        return self._places.counts(numbers)

    def exhausted(self) -> tuple[int, int] | None:
        """Return (first source to repeat a sample, sample numbers before that); None if no source ever repeats."""
        ends = [
            (end - 1, at)
            for at, part in enumerate(self.parts)
            if (end := self._places.places_of(at, part.size + 1)) is not None
        ]
        return min(ends)[::-1] if ends else None


def sources_of(shards: Shards | Sequence[Source]) -> tuple[Source, ...]:
    """Return sources unchanged, and shards as one unnamed source."""
    if not isinstance(shards, str | os.PathLike):
        sources = [item for item in shards if isinstance(item, Source)]
        if sources:
            assert len(sources) == len(shards), "sources, or shards"
            return tuple(sources)
    return (Source("", cast(Shards, shards)),)


def found_shards(source: Source) -> list[Place]:
    """Return the shards of a source. Raises DataError as `find_shards`, with the source's key."""
    try:
        return find_shards(source.shards)
    except DataError as error:
        remedy = ""
        if source.key == "data.validation_shards":
            remedy = "; to hold out a share of data.shards: data.validation_shards= data.validation_fraction=0.01; "
            remedy += "to hold out none: data.validation_shards="
        raise type(error)(str(error).replace("data.shards", source.key, 1) + remedy) from error


def order_of(
    sources: Sequence[Source],
    ends: Sequence[int],
    counts: Sequence[int],
    contents: Sequence[str],
    seed: int,
    shuffle: bool,
    block: int,
    held_fraction: float,
    only_held: bool,
) -> MixedOrder:
    """Return the order of all samples. Raises DataError for a source without rows.

    Args:
        ends: index after the last shard of each source.
        counts: samples of each shard.
        contents: content hash of each shard.
        seed, shuffle, block: see `GlobalOrder`.
        held_fraction: share that is held out.
        only_held: True for the held-out rows, False for the others.
    """
    parts, begin, first = [], 0, 0
    for source, end in zip(sources, ends, strict=True):
        rows, held_rows_of_source = sum(counts[begin:end]), None
        if held_fraction:
            starts = np.cumsum([0, *counts[begin:end]])
            of_shards = zip(starts, contents[begin:end], counts[begin:end], strict=False)
            held_rows_of_source = np.concatenate(
                [start + held_rows(content, count, held_fraction) for start, content, count in of_shards]
            )
        part = Part(first, rows, held_rows_of_source, only_held)
        if not part.size:
            of_rows = f"of the {rows} in {plural(end - begin, 'shard')}"
            if rows and only_held:
                raise DataError(
                    f"data.validation_fraction: {held_fraction:g} holds out none {of_rows} of {source.key}. Raise it"
                )
            cause = f": data.validation_fraction {held_fraction:g} holds out all of them. Lower it" if rows else ""
            raise DataError(f"{source.key}: no sample is left {of_rows}{cause}")
        parts.append(part)
        begin, first = end, first + rows
    weights = [source.weight for source in sources if source.weight is not None]
    # A source of weight 0 may be read alone, as `mimo-train check` does.
    phases = [(0, whole_weights(weights))] if any(weights) and len(weights) == len(sources) else []
    return MixedOrder(parts, phases, seed, shuffle, block)


def fingerprint_of(shards: Sequence[tuple[str, int, str, int]], ends: Sequence[int], held_fraction: float) -> str:
    """Return a hash of everything that determines the order, except seed and weights.

    Args:
        shards: (name, bytes, content, samples) of each.
        ends: index after the last shard of each source.
    """
    names: list = [*shards]
    names += [list(ends)] if len(ends) > 1 else []
    names += [held_fraction] if held_fraction else []
    # no cycles in thousands of lists
    return hashlib.sha256(json.dumps(names, check_circular=False).encode()).hexdigest()[:32]


def held_rows(content: str, rows: int, fraction: float) -> np.ndarray:
    """Return the held-out rows of a shard: those whose hash with `content` is below `fraction` of all hashes."""
    key = 0
    for byte in content.encode():
        key = splitmix(key ^ byte)
    hashes = splitmix_all(np.arange(rows, dtype=np.uint64) ^ np.uint64(key))
    return np.flatnonzero(hashes < np.uint64(fraction * 2.0**64))
