"""The plan of a step: its microbatches, the language-model replica of each sample, and the row lengths.

It is arithmetic on planned lengths, so all ranks compute the same plan without communication. A *place* is a position
in the step: place p is sample number first + p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Share:
    """One data-parallel rank's part of a microbatch, in the language model."""

    places: np.ndarray
    """int64 [samples]: places in the step, in row order."""
    length: int
    """Positions of a row."""


@dataclass(frozen=True)
class StepPlan:
    """How a step is cut. Lists over a microbatch's samples (token counts, loads) are in the order of `places`."""

    first: int
    """Number of the step's first sample."""
    size: int
    """Samples of the step, over all data-parallel ranks."""
    shares: tuple[tuple[Share, ...], ...]
    """Microbatch -> data-parallel rank of the language model -> share."""
    lengths: np.ndarray | None = None
    """int64 [size]: planned text tokens of each sample by place; None: unknown, and rows have full length."""
    packed: bool = False
    """True if the samples of a share form one row; else each answer has its own."""
    documents: Sequence[np.ndarray] | None = None
    """Tokens of each sample's answers or packed documents, by place, int64; None: each sample is one text."""
    answers: int = 1
    """Answers of each sample, of which each is a text of its own."""

    @cached_property
    def places(self) -> list[np.ndarray]:
        """Microbatch -> places of its samples, in order of data-parallel rank."""
        return [np.concatenate([share.places for share in of_ranks]) for of_ranks in self.shares]

    @cached_property
    def positions_and_replicas(self) -> tuple[np.ndarray, np.ndarray]:
        """For each place, int64 [size]: its position among the `places` of all microbatches, and the data-parallel rank
        of the language model that has it."""
        shares = [(rank, len(share.places)) for of_ranks in self.shares for rank, share in enumerate(of_ranks)]
        placed = np.empty((2, self.size), dtype=np.int64)
        placed[:, np.concatenate(self.places)] = np.arange(self.size), np.repeat(*np.array(shares, dtype=np.int64).T)
        return placed[0], placed[1]

    def lengths_in_row(self, numbers: np.ndarray, row_length: int) -> list[int]:
        """Return the tokens of each sample in a packed row, and of its trailing padding, if any."""
        assert self.lengths is not None, "packs follow from lengths"
        lengths = self.lengths[numbers - self.first].tolist()
        rest = row_length - sum(lengths)
        return [*lengths, rest] if rest else lengths

    def of_tokens(self, values: np.ndarray, share: Share) -> np.ndarray:
        """Return a value of each answer, int64 [answers * samples], for each of its tokens, [rows, S]; 0 for trailing
        padding of a packed row."""
        if not self.packed:
            return np.repeat(values[:, None], share.length, axis=1)
        lengths = self.lengths_of_answers(share.places)
        return np.repeat([*values, 0], [*lengths, share.length - lengths.sum()])[None]

    def rows(self, microbatch: int, replica: int) -> int:
        """Return the number of rows of a share."""
        return 1 if self.packed else self.answers * len(self.shares[microbatch][replica].places)

    def lengths_of_answers(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens of each answer of the samples at `places`, int64 [answers * places]."""
        assert self.lengths is not None, "lengths were not counted"
        if self.answers == 1:
            return self.lengths[places]
        assert self.documents is not None, "lengths of answers are counted apart"
        # The documents of no sample: a packed row may be padding alone.
        return np.concatenate([np.zeros(0, dtype=np.int64), *(self.documents[place] for place in places)])

    def feature_rows(self, counts: np.ndarray, share: Share) -> np.ndarray:
        """Return the row of the features of a share's samples for each of its placeholders, int64: every answer of a
        sample has the same. `counts`: int64 [size], features of each sample by place."""
        of_samples = counts[share.places]
        ends = np.cumsum(of_samples)
        rows = [np.arange(end - count, end) for end, count in zip(ends, of_samples, strict=True)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *(np.tile(of_sample, self.answers) for of_sample in rows)])

    @cached_property
    def texts_of_length(self) -> dict[int, int]:
        """Length -> number of separate attention texts: rows, or in packed rows documents and trailing padding."""
        return dict(sum(self.texts_of_ranks(), Counter()))

    def texts_of_ranks(self) -> list[Counter[int]]:
        """Return `texts_of_length` of each data-parallel rank of the language model."""
        of_ranks = [Counter[int]() for _ in self.shares[0]]
        for microbatch in range(len(self.shares)):
            for replica, texts in enumerate(of_ranks):
                texts.update(self.texts_of(microbatch, replica))
        return of_ranks

    def texts_of(self, microbatch: int, replica: int) -> Counter[int]:
        """Return `texts_of_length` of one share."""
        share = self.shares[microbatch][replica]
        if not self.packed:
            return Counter({share.length: self.rows(microbatch, replica)})
        assert self.lengths is not None, "packs follow from lengths"
        lengths = self.lengths[share.places]
        if self.documents is None:
            texts = Counter(lengths.tolist())
        else:
            texts = Counter(length for place in share.places for length in self.documents[place].tolist())
        if rest := share.length - int(lengths.sum()):
            texts[rest] += 1
        return texts

    @cached_property
    def positions(self) -> int:
        """The positions of all rows, padding included: the language model's work."""
        return sum(
            share.length * self.rows(microbatch, replica)
            for microbatch, of_ranks in enumerate(self.shares)
            for replica, share in enumerate(of_ranks)
        )

    @property
    def tokens(self) -> int:
        """The tokens of the step's samples without padding; with padding if lengths are unknown."""
        return self.positions if self.lengths is None else int(self.lengths.sum())


@dataclass(frozen=True)
class Padding:
    """How microbatches of similar lengths are made. unit: rows are multiples of it, for ranks that split sequences;
    equal: all rows of a step have the length of its longest sample."""

    unit: int = 8
    equal: bool = False


def plan_in_order(first: int, size: int, microbatch: int, replicas: int, length: int, answers: int = 1) -> StepPlan:
    """Return a plan with samples in order, `microbatch` in each microbatch over all replicas, and rows of `length`."""
    cut = np.arange(size, dtype=np.int64).reshape(-1, replicas, microbatch // replicas)
    shares = tuple(tuple(Share(places, length) for places in of_ranks) for of_ranks in cut)
    return StepPlan(first, size, shares, answers=answers)


def plan_by_length(
    first: int,
    lengths: np.ndarray,
    microbatch: int,
    replicas: int,
    longest: int,
    padding: Padding,
    documents: Sequence[np.ndarray] | None = None,
) -> StepPlan:
    """Return a plan with samples sorted by the planned length of their longest answer, the longest first. Equal ones
    stay in order.

    Rows have the length of their share's longest sample. The samples of a microbatch do not depend on the number of
    replicas. Each replica gets a run of neighbours; the longest goes to the replica with the fewest positions.

    Args:
        lengths: [size], planned tokens.
        longest: maximum positions of a row: `sequence_length`.
        documents: [size][answers], tokens of each answer; None: each sample has one.
    """
    rows = lengths if documents is None else np.max(documents, axis=1)
    order = np.argsort(-rows, kind="stable").astype(np.int64)
    cut = order.reshape(-1, replicas, microbatch // replicas)
    tops = np.minimum(-(-rows[cut[:, :, 0]] // padding.unit) * padding.unit, longest)
    tops = np.maximum(tops, min(padding.unit, longest))
    if padding.equal:
        tops = np.broadcast_to(tops[:1, :1], tops.shape)
    load = np.zeros(replicas, dtype=np.int64)
    shares = []
    for runs, top in zip(cut, tops, strict=True):
        ranks = np.argsort(load, kind="stable")  # the least loaded one first, for the longest run
        load[ranks] += top
        placed = np.argsort(ranks)
        shares.append(tuple(Share(runs[run], int(top[run])) for run in placed))
    answers = 1 if documents is None else len(documents[0])
    lengths = np.asarray(lengths, dtype=np.int64)
    return StepPlan(first, len(lengths), tuple(shares), lengths, documents=documents, answers=answers)
