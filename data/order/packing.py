"""Packing: assign the samples of a step to rows and data-parallel ranks, by arithmetic on planned lengths.

A step has the same samples as without packing, so its loss and gradients are the same, and a run can resume at any
sample number. Only the number of microbatches depends on lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.order.step_plan import Share, StepPlan

Pack = list[int]
"""Places in the step of a row's samples, ascending; empty for a row of padding."""


ROUNDED = 32
"""Row lengths are multiples of this, so that memory can be reused: 0.5 % of padding in rows of 3,000."""


@dataclass(frozen=True)
class Packing:
    """How to pack samples into rows.

    budget: maximum tokens of a row's samples; unit: rows are multiples of it, for ranks that split sequences;
    microbatches: their number is a multiple of it; equal: a microbatch's rows have the same length on all data-parallel
    ranks; pair: see `balance_ranks`.
    """

    budget: int
    unit: int = 1
    microbatches: int = 1
    equal: bool = False
    pair: float = 0.0

    def row_length(self, tokens: int) -> int:
        """Return the positions of a row with `tokens` tokens."""
        step = self.unit * -(-ROUNDED // self.unit)
        return step * max(1, -(-tokens // step))


def plan_in_packs(
    first: int,
    lengths: np.ndarray,
    replicas: int,
    packing: Packing,
    documents: Sequence[np.ndarray] | None = None,
    answers: int = 1,
) -> StepPlan:
    """Return the plan of a step in packed rows. See `pack_step`.

    Args:
        lengths: [size], planned tokens.
        documents: tokens of each sample's documents; None: each sample is one document.
        answers: answers of each sample; if several, they are its documents.
    """
    lengths = np.maximum(np.asarray(lengths, dtype=np.int64), 1)  # no document is empty; a stand-in may be
    if answers > 1:
        assert documents is not None, "answers are documents"
        documents = [np.maximum(of_sample, 1) for of_sample in documents]
        lengths = np.sum(documents, axis=1)
    tokens, squares = lengths.tolist(), lengths**2
    if documents is not None:
        squares = np.array([(of_sample**2).sum() for of_sample in documents], dtype=np.int64)
    shares = []
    for packs in pack_step(lengths, squares, replicas, packing):
        rows = [packing.row_length(sum(map(tokens.__getitem__, pack))) for pack in packs]
        rows = [max(rows)] * replicas if packing.equal else rows
        places = (np.array(pack, dtype=np.int64) for pack in packs)
        shares.append(tuple(map(Share, places, rows)))
    return StepPlan(first, len(tokens), tuple(shares), lengths, packed=True, documents=documents, answers=answers)


def pack_step(lengths: np.ndarray, squares: np.ndarray, ranks: int, packing: Packing) -> list[list[Pack]]:
    """Return the packs of a step: microbatch -> data-parallel rank -> pack. Each sample is in one pack.

    `balance_ranks` assigns samples of `lengths`, int64 [samples], to ranks. All ranks have the same number of packs, as
    few as possible. The longest sample goes first, each into the emptiest pack (Graham 1969, longest processing time
    first), so that rows need little padding. The packs of a microbatch have similar costs on all ranks.
    """
    budget, multiple = packing.budget, packing.microbatches
    assert 0 < int(lengths.max()) <= budget and min(ranks, multiple) > 0, (lengths.max(), packing, ranks)
    tokens = lengths.tolist()
    of_ranks = [
        sorted(places, key=tokens.__getitem__, reverse=True)
        for places in balance_ranks(lengths, squares, ranks, packing.pair)
    ]
    # Samples longer than half a pack never share one.
    least = max(
        max(-(-sum(of_rank) // budget), sum(2 * length > budget for length in of_rank))
        for of_rank in ([tokens[place] for place in places] for places in of_ranks)
    )
    count = multiple * -(-least // multiple)
    while (packs := [_spread(tokens, places, count, budget) for places in of_ranks]).count([]):
        count += multiple
    work = whole_work(lengths, squares, packing.pair).tolist()
    for of_rank in packs:
        of_rank.sort(key=lambda pack: sum(map(work.__getitem__, pack)), reverse=True)
    return [[sorted(of_rank[number]) for of_rank in packs] for number in range(count)]


def _spread(tokens: Sequence[int], places: Sequence[int], count: int, budget: int) -> list[Pack]:
    """Return `count` packs of a rank's samples, longest first; none if one does not fit."""
    packs: list[Pack] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for place in places:
        load, number = emptiest[0]
        if load + tokens[place] > budget:
            return []
        packs[number].append(place)
        heapq.heapreplace(emptiest, (load + tokens[place], number))
    return packs


_MEAN = 1 << 30
"""A rank's mean part of a quantity, in the integers that are summed here."""

_EVEN = 1.045
"""The busiest rank's load over the mean that counts as balanced."""

_PARTNERS = 3
"""Number of ranks, least loaded first, with which the busiest rank tries to exchange samples."""


def balance_ranks(lengths: np.ndarray, squares: np.ndarray, ranks: int, pair: float = 0.0) -> list[list[int]]:
    """Return the places of each rank's samples.

    Work that grows with tokens (and memory) and attention work, which grows with squared lengths, are both balanced.
    The largest sample goes first, each to the rank with the least of both (Graham 1969, longest processing time first);
    then the busiest rank exchanges samples. If that fails, as with one sample that has more attention than a rank's
    part, the weighted sum of both is balanced instead.

    Args:
        lengths: int64 [samples], tokens.
        squares: int64 [samples], proportional to pairs of tokens that attend: the squared length, or the sum over a
            sample's documents.
        pair: cost of one of `squares` relative to a token outside of attention.
    """
    places = list(range(len(lengths)))
    if ranks == 1:
        return [places]
    tokens, attention = _parts(lengths, ranks), _parts(squares, ranks)
    if int(attention.max()) <= _EVEN * _MEAN:
        of_ranks = largest_first(tokens + attention, ranks)
        if _even_out(of_ranks, np.stack([tokens, attention])):
            return of_ranks
    return largest_first(_parts(whole_work(lengths, squares, pair), ranks), ranks)


def whole_work(lengths: np.ndarray, squares: np.ndarray, pair: float) -> np.ndarray:
    """Return the total work, int64 [samples], in units of one token outside of attention. See `balance_ranks`."""
    return lengths + np.rint(pair * squares).astype(np.int64)


def _parts(quantity: np.ndarray, ranks: int) -> np.ndarray:
    """Scale a quantity to int64 with a mean of `_MEAN` per rank. Sums of fractions would depend on the machine."""
    return np.rint(quantity * (_MEAN * ranks / max(1, int(quantity.sum())))).astype(np.int64)


def largest_first(parts: np.ndarray, ranks: int) -> list[list[int]]:
    """Return the members of each rank: the largest of `parts`, int64, goes first, each to the rank with the least."""
    least = [(0, rank) for rank in range(ranks)]
    of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    order = np.argsort(-parts, kind="stable")
    for place, part in zip(order.tolist(), parts[order].tolist(), strict=True):
        load, rank = least[0]
        of_ranks[rank].append(place)
        heapq.heapreplace(least, (load + part, rank))
    return of_ranks


def _even_out(of_ranks: list[list[int]], parts: np.ndarray) -> bool:
    """Let the busiest rank exchange samples until it is balanced. Return True on success.

    An exchange swaps a sample for another rank's or for none, and must leave both with less than the busiest had.

    Args:
        of_ranks: samples of each rank; changed in place.
        parts: int64 [quantities, samples]; a rank's load is its largest quantity.
    """
    ranks, none = len(of_ranks), parts.shape[1]
    parts = np.concatenate([parts, np.zeros_like(parts[:, :1])], axis=1)
    loads = np.stack([parts[:, places].sum(axis=1) for places in of_ranks], axis=1)
    for _ in range(2 * ranks):
        busiest = int(loads.max(axis=0).argmax())
        most = int(loads[:, busiest].max())
        if most <= _EVEN * _MEAN:
            return True
        sources = [*of_ranks[busiest], none]
        for rank in np.argsort(loads[loads[:, busiest].argmax()], kind="stable")[:_PARTNERS].tolist():
            targets = [*of_ranks[rank], none]
            less = parts[:, sources, None] - parts[:, None, targets]
            then = np.maximum(loads[:, busiest, None, None] - less, loads[:, rank, None, None] + less).max(axis=0)
            best = int(then.argmin())
            if then.flat[best] < most:
                break
        else:
            return False
        giving, taking = divmod(best, len(targets))
        loads[:, busiest] -= less[:, giving, taking]
        loads[:, rank] += less[:, giving, taking]
        of_ranks[busiest] = _exchanged(sources, giving, targets[taking])
        of_ranks[rank] = _exchanged(targets, taking, sources[giving])
    return False


def _exchanged(places: list[int], at: int, by: int) -> list[int]:
    """Replace the place at `at` by `by`. The last of `places` means none and is dropped."""
    none = places[-1]
    return [place for place in [*places[:at], by, *places[at + 1 :]] if place != none]
