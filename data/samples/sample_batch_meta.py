"""What the media of samples take, for all samples of a step at once: the arrays that its plan is made from.

`SampleOutline` says the same of one sample, member by member; `tests/unit/data/test_step_plan.py` holds the two
together. What is kept in memory are the sizes of pictures and clips that occurred.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from data.index.catalogue import Rows
from data.index.shard_index import video_size
from data.media.options import Bounds
from data.order.order import splitmix
from data.records.members import Fields, arrange
from data.samples.frames import SAMPLING, Sampling
from data.samples.sample_meta import Media

_COLUMNS = ("tokens", "load", "pairs")
_VIDEO = -2  # of a member whose pictures are read
_PROBES, _RATES = 160, (8000, 16000, 22050, 24000, 32000, 44100, 48000)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LENGTHS_VERSION = 5
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
    documents: list[np.ndarray] | None = None
    """Of each sample its documents' tokens, int64, where attention stays inside them; None: each is one."""


def lengths_key(read_as: str, sequence_length: int, bounds: Bounds, modules: Sequence[Media]) -> str:
    """What the lengths of texts follow from beside the shard (`data.text_lengths`).

    What a module makes of a picture or clip is known by what it makes of some hundred sizes.

    Args:
        read_as: changes with whatever the tokens of a record follow from.
    """
    table = SampleTable(modules, sequence_length, bounds)
    sizes = {
        kind: [table.measured(kind, *extent, several) for extent in _probes(kind) for several in (False, True)]
        for kind in dict.fromkeys(media.kind for media in modules)
    }
    said = json.dumps([_LENGTHS_VERSION, read_as, sequence_length, asdict(bounds), sizes])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _probes(kind: str) -> list[tuple[int, int]]:
    """Sizes of pictures or clips, small ones and large ones."""
    found = []
    for number in range(_PROBES):
        one, two = (splitmix(2 * number + at) / 2**64 for at in range(2))
        if kind == "image":
            found.append((int(8192**one), int(8192**two)))
        else:
            found.append((int(3e7**one), _RATES[int(two * len(_RATES))]))
    return found


class SampleTable:
    """`MediaSize` of samples."""

    def __init__(
        self,
        modules: Sequence[Media],
        sequence_length: int,
        bounds: Bounds,
        sampling: Sampling = SAMPLING,
    ) -> None:
        self._modules, self._sequence_length, self._bounds = tuple(modules), sequence_length, bounds
        self._sampling = sampling
        self._kinds = list(dict.fromkeys(media.kind for media in modules))
        self._of_media: dict[str, dict[tuple[int, int, bool], tuple[int, ...] | None]] = {
            kind: {} for kind in self._kinds
        }

    def of(
        self, rows: Rows, lengths: np.ndarray | None = None, fields: Sequence[tuple[Fields, np.ndarray]] = ()
    ) -> StepSamples:
        """Of samples.

        Args:
            lengths: of these.
            fields: `data.fields` where there are any, each with the places of the samples that it is for.
        """
        found = self._sizes(rows, fields)
        tokens, loads, pairs = (
            {media.module: found[:, at * len(_COLUMNS) + column] for at, media in enumerate(self._modules)}
            for column in range(len(_COLUMNS))
        )
        return StepSamples(tokens, loads, pairs, lengths)

    def _sizes(self, rows: Rows, fields: Sequence[tuple[Fields, np.ndarray]]) -> np.ndarray:
        """int64 [samples, modules x columns]; zeros for samples that are bad by the index."""
        members, firsts, size = rows.members, rows.firsts, len(rows.samples)
        found = np.zeros((size, len(self._modules) * len(_COLUMNS)), dtype=np.int64)
        record, bad, kind_of_member = self._arranged(rows, fields)
        if len(members):
            records = np.where(bad, 0, firsts[:-1] + record)
            bad |= members["size"][records] > self._bounds.record_bytes
        placeholders = np.zeros(size, dtype=np.int64)
        owners = np.repeat(np.arange(size), np.diff(firsts))
        for at, kind in enumerate(self._kinds):
            is_video = (kind_of_member == _VIDEO) if kind == "image" else np.zeros(len(members), dtype=bool)
            own = np.flatnonzero((kind_of_member == at) | is_video)
            owner = owners[own]
            extents, times, usable = self._extents(members[own], is_video[own])
            number = _sums(owner, times, size)
            placeholders += number
            several = (number > 1)[owner].astype(np.int64)
            sizes, readable = self._look_up(kind, np.stack([*extents, several], axis=1))
            bad[owner[~(readable & usable)]] = True
            for place, column in enumerate(self._columns(kind)):
                found[:, column] = _sums(owner, sizes[:, place] * times, size)
        bad |= placeholders > self._bounds.placeholders
        bad |= found[:, :: len(_COLUMNS)].sum(axis=1) > self._sequence_length
        found[bad] = 0
        return found

    def _extents(self, members: np.ndarray, is_video: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """(both numbers of the extent of each, how many pictures or clips it is, whether it is within the bounds of
        videos), as `pictures_of` and `count_tokens` have it."""
        first, second = (members[name].astype(np.int64) for name in ("first", "second"))
        times, usable = np.ones(len(members), dtype=np.int64), np.ones(len(members), dtype=bool)
        if is_video.any():
            milliseconds = second[is_video]
            above = (members["size"][is_video] > self._bounds.video_bytes) | (
                milliseconds / 1000 > self._bounds.seconds
            )
            usable[is_video] = (milliseconds > 0) & ~above
            times[is_video] = self._sampling.counts(milliseconds)
            first[is_video], second[is_video] = video_size(first[is_video])
        return [first, second], times, usable

    def _arranged(
        self, rows: Rows, fields: Sequence[tuple[Fields, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(record of each sample among its members, whether it is bad by its names, number of the kind of each member,
        _VIDEO, or -1)."""
        number = {kind: at for at, kind in enumerate(self._kinds)}
        if "image" in number:
            number["video"] = _VIDEO
        codes = rows.members["code"]
        record = rows.samples["record"].astype(np.int64)
        bad = (rows.samples["reason"] != 0) | (record < 0)
        kinds = np.array([number.get(kind, -1) for kind in rows.kinds], dtype=np.int64)[codes]
        firsts = rows.firsts.tolist()
        for own, places in fields:
            for at in places.tolist():
                start, end = firsts[at : at + 2]
                arranged = arrange(tuple(rows.names[code] for code in codes[start:end].tolist()), own)
                bad[at] = arranged.reason is not None or arranged.record < 0
                record[at] = 0 if bad[at] else arranged.order[arranged.record]
                for place, kind in zip(arranged.order, arranged.kinds, strict=True):
                    kinds[start + place] = number.get(kind, -1)
        return record, bad, kinds

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
                known[key] = self.measured(kind, *key)
            measured = known[key]
            readable[at] = measured is not None
            sizes[at] = 0 if measured is None else measured
        return sizes[codes], readable[codes]

    def measured(self, kind: str, first: int, second: int, several: bool) -> tuple[int, ...] | None:
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
            if media.above((first, second), extent, self._bounds):
                return None
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
