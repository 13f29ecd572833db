"""What the media of every sample take, for all samples at once: the arrays that the plan of a step is made from.

`SampleOutline` says the same of one sample, member by member; `tests/unit/data/test_step_plan.py` holds the two
together. Of each sample a code of four bytes is kept in memory, for the few combinations that occur.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from data.bounds import Bounds
from data.index import ShardIndex, kind_of
from data.outline import Media

_COLUMNS = ("tokens", "load", "pairs")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LENGTHS_VERSION = 1
"""Raised where a program counts other lengths of the same texts, or writes them otherwise."""


@dataclass(frozen=True)
class StepSamples:
    """What is known of the samples of a step, by their places; arrays are int64 [size]."""

    tokens: dict[str, np.ndarray]
    """By module: tokens in the sequence (`MediaSize`)."""
    loads: dict[str, np.ndarray]
    """By module: tokens inside the encoder's layers."""
    pairs: dict[str, np.ndarray]
    """By module: pairs of tokens inside the encoder that attend to each other."""
    lengths: np.ndarray | None
    """Tokens of the whole sequence, cut; None where they have not been counted."""


def lengths_key(text_fingerprint: str, sequence_length: int, bounds: Bounds, media_tokens: np.ndarray) -> str:
    """What the lengths of a shard's texts follow from beside the shard (`data.text_lengths`).

    Args:
        media_tokens: int64 [samples, modules].
    """
    said = json.dumps([_LENGTHS_VERSION, text_fingerprint, sequence_length, asdict(bounds), media_tokens.shape])
    digest = hashlib.sha256(said.encode())
    digest.update(np.ascontiguousarray(media_tokens).tobytes())
    return digest.hexdigest()[:16]


class SampleTable:
    """`MediaSize` of all samples of shards, that are added in their order."""

    def __init__(self, modules: Sequence[Media], sequence_length: int, bounds: Bounds) -> None:
        self._modules, self._sequence_length, self._bounds = tuple(modules), sequence_length, bounds
        self._kinds = list(dict.fromkeys(media.kind for media in modules))
        self._of_media: dict[str, dict[tuple[int, int, bool], tuple[int, ...] | None]] = {
            kind: {} for kind in self._kinds
        }
        self._codes: list[np.ndarray] = []
        self._known: dict[bytes, int] = {}
        self._rows: list[np.ndarray] = []
        self._joined: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, index: ShardIndex) -> np.ndarray:
        """Adds the samples of the next shard; gives int64 [samples, modules], tokens in the sequence of each."""
        found = self._sizes(index)
        distinct, codes = _distinct(found)
        own = np.empty(len(distinct), dtype=np.int32)
        for at, row in enumerate(distinct):
            own[at] = self._known.setdefault(row.tobytes(), len(self._rows))
            if own[at] == len(self._rows):
                self._rows.append(row)
        self._codes.append(own[codes])
        self._joined = None
        return found[:, :: len(_COLUMNS)]

    def of(self, rows: np.ndarray, lengths: np.ndarray | None = None) -> StepSamples:
        """Of samples by their rows over all shards. `lengths`: of these."""
        if self._joined is None:
            width = len(self._modules) * len(_COLUMNS)
            table = np.array(self._rows, dtype=np.int64).reshape(len(self._rows), width)
            self._joined = np.concatenate(self._codes), table
            self._codes = [self._joined[0]]
        codes, table = self._joined
        found = table[codes[rows]]
        tokens, loads, pairs = (
            {media.module: found[:, at * len(_COLUMNS) + column] for at, media in enumerate(self._modules)}
            for column in range(len(_COLUMNS))
        )
        return StepSamples(tokens, loads, pairs, lengths)

    def _sizes(self, index: ShardIndex) -> np.ndarray:
        """int64 [samples, modules x columns], of one shard; zeros for samples that are bad by the index."""
        samples, members = index.samples, index.all_members
        firsts = samples["first_member"].astype(np.int64)
        found = np.zeros((len(index), len(self._modules) * len(_COLUMNS)), dtype=np.int64)
        record = samples["record"][:-1]
        bad = (samples["reason"][:-1] != 0) | (record < 0)
        if len(members):
            records = np.where(bad, 0, firsts[:-1] + record)
            bad |= members["size"][records] > self._bounds.record_bytes
        placeholders = np.zeros(len(index), dtype=np.int64)
        owners = np.repeat(np.arange(len(index)), np.diff(firsts))
        kinds = np.array([kind_of(extension) for extension in index.extensions] or [""])
        kind_of_member = kinds[members["extension"]] if len(members) else np.zeros(0, dtype=str)
        for kind in self._kinds:
            own = np.flatnonzero(kind_of_member == kind)
            owner = owners[own]
            number = np.bincount(owner, minlength=len(index))
            placeholders += number
            names = ("height", "width") if kind == "image" else ("frames", "rate")
            extents = [members[name][own].astype(np.int64) for name in names]
            several = (number > 1)[owner].astype(np.int64)
            sizes, readable = self._look_up(kind, np.stack([*extents, several], axis=1))
            bad[owner[~readable]] = True
            for at, column in enumerate(self._columns(kind)):
                found[:, column] = _sums(owner, sizes[:, at], len(index))
        bad |= placeholders > self._bounds.placeholders
        bad |= found[:, :: len(_COLUMNS)].sum(axis=1) > self._sequence_length
        found[bad] = 0
        return found

    def _columns(self, kind: str) -> list[int]:
        """Of the modules that take this kind, in the order of `_measured`."""
        return [
            number * len(_COLUMNS) + column
            for number, media in enumerate(self._modules)
            if media.kind == kind
            for column in range(len(_COLUMNS))
        ]

    def _look_up(self, kind: str, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sizes int64 [members, columns] and whether each can be read, from extents and whether there are several,
        int64 [members, 3]. Each distinct one is measured once."""
        known, width = self._of_media[kind], len(self._columns(kind))
        distinct, codes = _distinct(members)
        sizes, readable = np.zeros((len(distinct), width), dtype=np.int64), np.ones(len(distinct), dtype=bool)
        for at, (first, second, several) in enumerate(distinct.tolist()):
            key = (first, second, bool(several))
            if key not in known:
                known[key] = self._measured(kind, *key)
            measured = known[key]
            readable[at] = measured is not None
            sizes[at] = 0 if measured is None else measured
        return sizes[codes], readable[codes]

    def _measured(self, kind: str, first: int, second: int, several: bool) -> tuple[int, ...] | None:
        """Tokens, load and pairs of one picture or clip, for every module that takes its kind; None if it cannot be
        used. As `count_tokens` and `SampleOutline.media_size` have it."""
        above = self._bounds.of_picture if kind == "image" else self._bounds.of_clip
        if 0 in (first, second) or above(first, second):
            return None
        found: list[int] = []
        for media in self._modules:
            if media.kind != kind:
                continue
            (extent, *_) = media.extents([(first, second)] * (2 if several else 1))
            try:
                media.size(*extent)
                tokens = media.num_tokens(*extent)
            except Exception:  # whatever an encoder raises: the sample's outline has the words
                return None
            load = media.inner_tokens(*extent) if media.inner_tokens else tokens
            found += [tokens, load, media.pairs(*extent) if media.pairs else load**2]
        return tuple(found)


def _sums(owner: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sums of values by their owner, which ascend, int64 [size]; `bincount` would sum in floating point."""
    ends = np.concatenate([[0], np.cumsum(values)])
    bounds = np.searchsorted(owner, np.arange(size + 1))
    return ends[bounds[1:]] - ends[bounds[:-1]]


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct rows, which of them each row is), of int64 [N, columns]."""
    mixed = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:  # to sort numbers is ten times as fast as to sort rows
        mixed = (mixed ^ column.astype(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    _, firsts, codes = np.unique(mixed, return_index=True, return_inverse=True)
    distinct = rows[firsts]
    if (distinct[codes] != rows).any():  # two rows with one hash
        distinct, codes = np.unique(rows, axis=0, return_inverse=True)
    return distinct, codes.reshape(-1)
