"""Packing: which samples of a step share a row, and which data-parallel rank has the row. Arithmetic on planned
lengths, the same on every rank.

The samples of a step are those of the same step unpacked, so that its losses and gradients are too, and a run goes on
at any sample number. Only how many microbatches it takes follows from the lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.order.step_plan import Share, StepPlan

Pack = list[int]
"""Places in the step of the samples of one row, ascending; empty: a row of padding."""


ROUNDED = 32
"""Rows come in few lengths, so that memory of earlier rows can be used again: 0.5 % of padding in rows of 3,000."""


@dataclass(frozen=True)
class Packing:
    """How rows of several samples are made.

    budget: most tokens of the samples of a row; unit: rows are multiples of it, as parallel ranks that split sequences
    need; microbatches: their number is a multiple of it; equal: the rows of a microbatch are as long on every
    data-parallel rank; pair: see `balance_ranks`.
    """

    budget: int
    unit: int = 1
    microbatches: int = 1
    equal: bool = False
    pair: float = 0.0

    def row_length(self, tokens: int) -> int:
        """Positions of a row of so many tokens."""
        step = self.unit * -(-ROUNDED // self.unit)
        return step * max(1, -(-tokens // step))


def plan_in_packs(
    first: int,
    lengths: np.ndarray,
    replicas: int,
    packing: Packing,
    documents: Sequence[np.ndarray] | None = None,
) -> StepPlan:
    """The plan of a step in packed rows, by `pack_step`.

    Args:
        lengths: [size], planned tokens.
        replicas: data-parallel ranks of the language model.
        documents: of each sample the tokens of its documents; None: it is one.
    """
    lengths = np.maximum(np.asarray(lengths, dtype=np.int64), 1)  # no document is empty; a stand-in without media is
    tokens, squares = lengths.tolist(), lengths**2
    if documents is not None:
        squares = np.array([(of_sample**2).sum() for of_sample in documents], dtype=np.int64)
    shares = []
    for packs in pack_step(lengths, squares, replicas, packing):
        rows = [packing.row_length(sum(map(tokens.__getitem__, pack))) for pack in packs]
        rows = [max(rows)] * replicas if packing.equal else rows
        places = (np.array(pack, dtype=np.int64) for pack in packs)
        shares.append(tuple(map(Share, places, rows)))
    return StepPlan(first, len(tokens), tuple(shares), lengths, packed=True, documents=documents)


def pack_step(lengths: np.ndarray, squares: np.ndarray, ranks: int, packing: Packing) -> list[list[Pack]]:
    """The packs of a step: microbatch -> data-parallel rank -> pack. Every sample is in one pack.

    `balance_ranks` gives samples to ranks. Each rank has as many packs, as few as hold what any of them has. They are
    filled evenly, the longest sample first, each into the emptiest pack (Graham 1969, longest processing time first),
    so that a row need not be padded to the budget. The packs of a microbatch are about as costly on all ranks.

    Args:
        lengths: int64 [samples], tokens of every sample of the step.
        squares: see `balance_ranks`.
        ranks: data-parallel ranks of the language model.
    """
    budget, multiple = packing.budget, packing.microbatches
    assert 0 < int(lengths.max()) <= budget and min(ranks, multiple) > 0, (lengths.max(), packing, ranks)
    tokens = lengths.tolist()
    own = [
        sorted(places, key=tokens.__getitem__, reverse=True)
        for places in balance_ranks(lengths, squares, ranks, packing.pair)
    ]
    # Of those longer than half a pack, none stand together.
    least = max(
        max(-(-sum(of_rank) // budget), sum(2 * length > budget for length in of_rank))
        for of_rank in ([tokens[place] for place in places] for places in own)
    )
    count = multiple * -(-least // multiple)
    while (packs := _all_spread(tokens, own, count, budget)) is None:
        count += multiple
    work = whole_work(lengths, squares, packing.pair).tolist()
    for of_rank in packs:
        of_rank.sort(key=lambda pack: sum(map(work.__getitem__, pack)), reverse=True)
    return [[sorted(of_rank[number]) for of_rank in packs] for number in range(count)]


def _all_spread(
    tokens: Sequence[int], own: Sequence[Sequence[int]], count: int, budget: int
) -> list[list[Pack]] | None:
    """`count` packs of each rank; None where a sample fits into none.

    Args:
        own: samples of each rank, the longest first.
    """
    found = []
    for places in own:
        packs = _spread(tokens, places, count, budget)
        if packs is None:
            return None
        found.append(packs)
    return found


def _spread(tokens: Sequence[int], places: Sequence[int], count: int, budget: int) -> list[Pack] | None:
    """The same of one rank."""
    packs: list[Pack] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for place in places:
        load, number = emptiest[0]
        if load + tokens[place] > budget:
            return None
        packs[number].append(place)
        heapq.heapreplace(emptiest, (load + tokens[place], number))
    return packs


_MEAN = 1 << 30
"""A rank's part of a quantity, if all had as much, in the whole numbers that are added up here."""

_EVEN = 1.045
"""What the busiest rank has over the mean that is even enough."""

_PARTNERS = 3
"""With how many ranks the busiest one tries to exchange samples, those with the least first."""


def balance_ranks(lengths: np.ndarray, squares: np.ndarray, ranks: int, pair: float = 0.0) -> list[list[int]]:
    """The samples of each rank, by their place.

    Work that grows with tokens (memory too) and work in attention, which grows with squares of lengths, are both
    evened out: the largest sample first, each goes to the rank with the least of both (Graham 1969, longest processing
    time first), then the busiest rank exchanges samples. Where that leaves a rank with clearly more than the mean, as
    it must if one sample has more attention than a rank's part, the sum of both is evened out, each with its weight.

    Args:
        lengths: int64 [samples], tokens.
        squares: int64 [samples], of the same order as pairs of tokens that attend: the square of the length, or of a
            sample of several documents the sum of theirs.
        pair: work of one of `squares` over that of one token outside of attention.
    """
    places = list(range(len(lengths)))
    if ranks == 1:
        return [places]
    tokens, attention = _parts(lengths, ranks), _parts(squares, ranks)
    if int(attention.max()) <= _EVEN * _MEAN:
        own = _largest_first(tokens + attention, ranks)
        if _even_out(own, np.stack([tokens, attention])):
            return own
    return _largest_first(_parts(whole_work(lengths, squares, pair), ranks), ranks)


def whole_work(lengths: np.ndarray, squares: np.ndarray, pair: float) -> np.ndarray:
    """int64 [samples], in that of one token outside of attention; arguments as those of `balance_ranks`."""
    return lengths + np.rint(pair * squares).astype(np.int64)


def _parts(quantity: np.ndarray, ranks: int) -> np.ndarray:
    """int64 [samples], of `_MEAN` for a rank on average. Only whole numbers are added, here and of these parts: sums of
    fractions would depend on how a machine adds, and ranks have to agree."""
    return np.rint(quantity * (_MEAN * ranks / max(1, int(quantity.sum())))).astype(np.int64)


def _largest_first(parts: np.ndarray, ranks: int) -> list[list[int]]:
    """Samples of each rank, where the largest first each went to the rank with the least."""
    least = [(0, rank) for rank in range(ranks)]
    own: list[list[int]] = [[] for _ in range(ranks)]
    order = np.argsort(-parts, kind="stable")
    for place, part in zip(order.tolist(), parts[order].tolist(), strict=True):
        load, rank = least[0]
        own[rank].append(place)
        heapq.heapreplace(least, (load + part, rank))
    return own


def _even_out(own: list[list[int]], parts: np.ndarray) -> bool:
    """Lets the busiest rank exchange a sample for another rank's, or for none, as long as both then have less than it
    had and until it has hardly more than the mean. Whether that was reached.

    Args:
        own: samples of each rank; changed in place.
        parts: int64 [quantities, samples]; a rank has as much to do as of that quantity of which it has most.
    """
    ranks, none = len(own), parts.shape[1]
    parts = np.concatenate([parts, np.zeros_like(parts[:, :1])], axis=1)
    loads = np.stack([parts[:, places].sum(axis=1) for places in own], axis=1)
    for _ in range(2 * ranks):
        busiest = int(loads.max(axis=0).argmax())
        most = int(loads[:, busiest].max())
        if most <= _EVEN * _MEAN:
            return True
        given = [*own[busiest], none]
        for rank in np.argsort(loads[loads[:, busiest].argmax()], kind="stable")[:_PARTNERS].tolist():
            taken = [*own[rank], none]
            less = parts[:, given, None] - parts[:, None, taken]
            then = np.maximum(loads[:, busiest, None, None] - less, loads[:, rank, None, None] + less).max(axis=0)
            best = int(then.argmin())
            if then.flat[best] < most:
                break
        else:
            return False
        giving, taking = divmod(best, len(taken))
        loads[:, busiest] -= less[:, giving, taking]
        loads[:, rank] += less[:, giving, taking]
        own[busiest] = _exchanged(given, giving, taken[taking])
        own[rank] = _exchanged(taken, taking, given[giving])
    return False


def _exchanged(places: list[int], at: int, by: int) -> list[int]:
    """All but the last of `places`, which is none, with `by` for the one at `at`; none for one, or one for none."""
    none = places[-1]
    return [place for place in [*places[:at], by, *places[at + 1 :]] if place != none]
