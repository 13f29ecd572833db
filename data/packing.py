"""Packing: which samples of a step stand in one row, and which data-parallel rank has the row. Arithmetic on planned
lengths, the same on every rank; imports no torch.

The samples of a step are those of the same step unpacked, so that its losses and gradients are too, and a run goes on
at any sample number. Only how many microbatches it takes follows from the lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.step_plan import Share, StepPlan

Pack = list[int]
"""Places in the step of the samples of one row, ascending; empty: a row of padding."""


ROUNDED = 32
"""Rows come in few lengths, so that memory of earlier rows can be used again: 0.5 % of padding in rows of 3,000."""


@dataclass(frozen=True)
class Packing:
    """How rows of several samples are made.

    budget: most tokens of the samples of a row; unit: rows are multiples of it, as parallel ranks that split sequences
    need; microbatches: their number is a multiple of it; equal: the rows of a microbatch are as long on every
    data-parallel rank.
    """

    budget: int
    unit: int = 1
    microbatches: int = 1
    equal: bool = False

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
    tokens = lengths.tolist()
    work = None if documents is None else [int((of_sample**2).sum()) for of_sample in documents]
    shares = []
    for packs in pack_step(tokens, replicas, packing.budget, packing.microbatches, work):
        rows = [packing.row_length(sum(map(tokens.__getitem__, pack))) for pack in packs]
        rows = [max(rows)] * replicas if packing.equal else rows
        places = (np.array(pack, dtype=np.int64) for pack in packs)
        shares.append(tuple(map(Share, places, rows)))
    planned = np.asarray(lengths, dtype=np.int64)
    return StepPlan(first, len(tokens), tuple(shares), planned, packed=True, documents=documents)


def pack_step(
    lengths: Sequence[int], ranks: int, budget: int, multiple: int = 1, work: Sequence[int] | None = None
) -> list[list[Pack]]:
    """The packs of a step: microbatch -> data-parallel rank -> pack. Every sample is in one pack.

    There are as few packs as hold all tokens, and as many on every rank. Packs are filled evenly, the longest sample
    first, each into the emptiest pack (Graham 1969, longest processing time first), so that a row need not be padded to
    the budget. They are dealt to ranks by their cost in attention, which grows with the squares of lengths: the packs
    of a microbatch are about as costly, and the rank that has had least so far gets the most costly of them.

    Args:
        lengths: tokens of every sample of the step.
        ranks: data-parallel ranks of the language model.
        budget: most tokens of a pack; no sample has more.
        multiple: what divides the number of microbatches.
        work: of every sample, in attention; None: the square of its length.
    """
    assert 0 < max(lengths) <= budget and min(ranks, multiple) > 0, (max(lengths), budget, ranks, multiple)
    unit = ranks * multiple
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    # Of those longer than half a pack, none stand together.
    least = max(-(-sum(lengths) // budget), sum(2 * length > budget for length in lengths))
    count = needed = unit * -(-least // unit)
    while True:
        packs, needed = _spread(lengths, order, count, budget, unit)
        if needed == count:
            break
        count = needed
    work = [length**2 for length in lengths] if work is None else work
    costs = [sum(map(work.__getitem__, pack)) for pack in packs]
    by_cost = sorted(range(count), key=costs.__getitem__, reverse=True)
    loads = [0] * ranks
    dealt = []
    for first in range(0, count, ranks):
        lightest_first = sorted(range(ranks), key=loads.__getitem__)
        of_ranks = [0] * ranks
        for rank, number in zip(lightest_first, by_cost[first : first + ranks], strict=True):
            of_ranks[rank] = number
            loads[rank] += costs[number]
        dealt.append(of_ranks)
    _even_out(dealt, costs, loads)
    return [[sorted(packs[number]) for number in of_ranks] for of_ranks in dealt]


def _even_out(dealt: list[list[int]], costs: Sequence[int], loads: list[int]) -> None:
    """Lets the busiest rank exchange packs with another, as long as both then have less than it had and until it has
    hardly more than the mean.

    Args:
        dealt: microbatch -> rank -> pack; changed in place, as `loads`, what each rank has of `costs`.
    """
    ranks = len(loads)
    enough = _EVEN * sum(loads) / ranks
    for _ in range(2 * ranks):
        busiest = max(range(ranks), key=loads.__getitem__)
        best, change = loads[busiest], None
        if best <= enough:
            return
        for given in dealt:
            own = costs[given[busiest]]
            for taken in dealt:
                for rank, number in enumerate(taken):
                    less = own - costs[number]
                    if less > 0 and (then := max(loads[busiest] - less, loads[rank] + less)) < best:
                        best, change = then, (given, taken, rank, less)
        if change is None:
            return
        given, taken, rank, less = change
        given[busiest], taken[rank] = taken[rank], given[busiest]
        loads[busiest] -= less
        loads[rank] += less


_EVEN = 1.03
"""Work of the busiest rank over the mean of all that is even enough."""


def _spread(lengths: Sequence[int], order: Sequence[int], count: int, budget: int, unit: int) -> tuple[list[Pack], int]:
    """`count` packs, and how many it took: where a sample fits into none, `unit` more are begun."""
    packs: list[Pack] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for place in order:
        length = lengths[place]
        load, number = emptiest[0]
        if load + length > budget:
            for new in range(len(packs), len(packs) + unit):
                packs.append([])
                heapq.heappush(emptiest, (0, new))
            load, number = emptiest[0]
        packs[number].append(place)
        heapq.heapreplace(emptiest, (load + length, number))
    return packs, len(packs)
