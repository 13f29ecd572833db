"""Mixtures of sources: place in the stream -> (source, item of the source), by arithmetic.

Sources have integer weights w_i with sum W. After n places, source i has n w_i / W items, off by less than one. This
holds if and only if item j of source i is in its window, from floor(j W / w_i) to ceil((j + 1) W / w_i) - 1. Earliest
deadline first among open windows achieves it (Baruah, Cohen, Plaxton, Varvel 1996, for one processor).

Such a pattern repeats after W places, and ranks read fixed parts of a microbatch: with weights 1:1:1:1 and four ranks
each would see one source only. So each block of whole patterns gets one of `VARIANTS` by a keyed hash, in which items
swap places within their windows.

If W is too large for a table (sizes of sources as weights), a tree of rounded binary splits gives the items before a
block. It is off by less than 1.5, and exact after W places; with the pattern in the block, by less than 3.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from data.order.order import splitmix, splitmix_all

MOST_IN_TABLE = 65_536
"""Largest sum of reduced weights for a pattern in a table."""
BLOCK = 1024
"""Minimum places of a block; `TREE_BLOCK` with a tree."""
TREE_BLOCK = 4096
VARIANTS = 16
"""Patterns of the same weights."""
ROUNDS, TREE_ROUNDS = 256, 16
"""Maximum rounds of swaps between neighbours. A table's pattern is made once, so it may take more."""
_LARGEST_SUM = 2**31
"""Larger weights are scaled to this sum, so that a product of two fits int64. Shares change by less than 1e-9."""
_FAR = 2**62
"""More places than any run has."""

Phase = tuple[int, tuple[int, ...]]
"""(first place, reduced weights from there on)."""


def whole_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Return weights (at least 0, not all 0) as integers in lowest terms; decimals as written: 0.1 is one tenth."""
    exact = [weight if isinstance(weight, int | Fraction) else Fraction(str(weight)) for weight in weights]
    assert exact and min(exact) >= 0 and sum(exact) > 0, weights
    scale = math.lcm(*(Fraction(weight).denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    if sum(integers) > _LARGEST_SUM:
        total = sum(integers)
        integers = [-(-weight * _LARGEST_SUM // total) for weight in integers]
        integers[integers.index(max(integers))] -= sum(integers) - _LARGEST_SUM
    common = math.gcd(*integers)
    return tuple(weight // common for weight in integers)


class Mixture:
    """Places of sources with fixed weights, integers in lowest terms."""

    def __init__(self, weights: Sequence[int], seed: int = 0):
        self.weights, self._seed = tuple(weights), seed
        total = sum(self.weights)
        self._tree = None if total <= MOST_IN_TABLE else _tree(self.weights)
        # The stream repeats cycles; the last block of a cycle may be shorter.
        repeats = 1 if self._tree else -(-BLOCK // total)
        self._cycle = repeats * total
        self._of_cycle = [repeats * weight for weight in self.weights]
        self._block = TREE_BLOCK if self._tree else self._cycle
        self._rounds = TREE_ROUNDS if self._tree else ROUNDS
        self._before = lru_cache(maxsize=8)(self._counts_before)

    def counts(self, places: int) -> list[int]:
        """Return the items of each source in the first `places` places."""
        cycle, block, rest = self._at(places)
        base = self._before(cycle, block)
        if not rest:
            return list(base)
        added = np.bincount(self._pattern(cycle, block)[0][:rest], minlength=len(base))
        return [before + int(count) for before, count in zip(base, added, strict=True)]

    def items(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, items of the sources) at places, int64."""
        places = np.asarray(places, dtype=np.int64)
        cycles, rests = np.divmod(places, self._cycle)
        firsts = places - rests % self._block
        sources, items = np.empty_like(places), np.empty_like(places)
        for first in np.unique(firsts).tolist():
            of_block = firsts == first
            cycle, block, _ = self._at(first)
            pattern, numbers = self._pattern(cycle, block)
            rest = places[of_block] - first
            of_place = pattern[rest]
            sources[of_block] = of_place
            items[of_block] = np.asarray(self._before(cycle, block), dtype=np.int64)[of_place] + numbers[rest]
        return sources, items

    def _at(self, place: int) -> tuple[int, int, int]:
        """Return (cycle, block of the cycle, place in the block)."""
        cycle, rest = divmod(place, self._cycle)
        return cycle, *divmod(rest, self._block)

    def _counts_before(self, cycle: int, block: int) -> list[int]:
        counts = [cycle * count for count in self._of_cycle]
        if self._tree is not None:
            _count(self._tree, min(block * self._block, self._cycle), counts)
        return counts

    def _pattern(self, cycle: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        if self._tree is None:
            counts = tuple(self._of_cycle)
        else:
            before, after = self._before(cycle, block), self._before(cycle, block + 1)
            counts = tuple(end - start for start, end in zip(before, after, strict=True))
        key = splitmix(splitmix(splitmix(self._seed & (1 << 64) - 1) + cycle) + block)
        return _pattern(counts, key % VARIANTS, self._rounds)


class Phases:
    """Places of sources whose weights change in `phases`, the first at 0. Each source continues at its next item."""

    def __init__(self, phases: Sequence[Phase], seed: int = 0):
        self.phases = [(start, tuple(weights)) for start, weights in phases]
        self._starts = [start for start, _ in self.phases]
        assert self._starts[0] == 0 and all(a < b for a, b in zip(self._starts, self._starts[1:], strict=False)), phases
        self._mixtures = [Mixture(weights, seed) for _, weights in self.phases]
        self._before = [[0] * len(self.phases[0][1])]
        for number, start in enumerate(self._starts[1:]):
            counts = self._mixtures[number].counts(start - self._starts[number])
            self._before.append([a + b for a, b in zip(self._before[-1], counts, strict=True)])

    def weights(self, place: int) -> tuple[int, ...]:
        """Return the reduced weights at a place."""
        return self.phases[self._at(place)][1]

    def counts(self, places: int) -> list[int]:
        """Return the items of each source in the first `places` places."""
        at = self._at(places)
        added = self._mixtures[at].counts(places - self._starts[at])
        return [before + count for before, count in zip(self._before[at], added, strict=True)]

    def items(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, items of the sources) at places, int64."""
        places = np.asarray(places, dtype=np.int64)
        phases = np.searchsorted(self._starts, places, side="right") - 1
        sources, items = np.empty_like(places), np.empty_like(places)
        for at in np.unique(phases).tolist():
            of_phase = phases == at
            of_place, numbers = self._mixtures[at].items(places[of_phase] - self._starts[at])
            sources[of_phase] = of_place
            items[of_phase] = np.asarray(self._before[at], dtype=np.int64)[of_place] + numbers
        return sources, items

    def places_of(self, source: int, items: int) -> int | None:
        """Return the minimum number of places with `items` items of a source; None if that never happens."""
        low, high = 0, 1
        while self.counts(high)[source] < items:
            paused = high >= self._starts[-1] and not self.phases[-1][1][source]  # permanently
            if paused or high >= _FAR:
                return None
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[source] >= items else (middle + 1, high)
        return low

    def _at(self, place: int) -> int:
        assert place >= 0, place
        return bisect_right(self._starts, place) - 1


@lru_cache(maxsize=2 * VARIANTS)
def _pattern(counts: tuple[int, ...], variant: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, item of the source within the block) of each place of a block with these item counts.

    Each item draws a wanted place in its window. Neighbours in the wrong order swap if both stay in their windows, in
    `rounds` rounds of odd-even transposition.
    """
    sources, opens, closes = _by_due(counts)
    size = len(sources)
    hashes = splitmix_all(np.arange(size, dtype=np.uint64) + np.uint64(splitmix(variant)))
    wanted = opens + (hashes % (closes - opens + 1).astype(np.uint64)).astype(np.int64)
    item, place = np.arange(size), np.arange(size)
    for turn in range(min(rounds, 2 * int((closes - opens).max()))):
        left, right = item[turn % 2 : size - 1 : 2], item[turn % 2 + 1 :: 2]
        at = place[turn % 2 : size - 1 : 2]
        swap = (wanted[left] > wanted[right]) & (closes[left] > at) & (opens[right] <= at)
        left[swap], right[swap] = right[swap], left[swap]  # views of `item`; the right side is copied first
    sources = sources[item]
    numbers = np.empty(size, dtype=np.int64)
    by_source = np.argsort(sources, kind="stable")
    numbers[by_source] = place - np.repeat(np.cumsum(counts) - counts, counts)
    return sources, numbers


@lru_cache(maxsize=4)
def _by_due(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each place's source, and the first and last place of its item's window."""
    size = sum(counts)
    sources = np.repeat(np.arange(len(counts)), counts)
    item = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    share = np.repeat(counts, counts)
    opens, closes = item * size // share, -(-(item + 1) * size // share) - 1
    by_opening = np.argsort(opens, kind="stable")
    waiting = list(zip(opens[by_opening].tolist(), (closes * size + np.arange(size))[by_opening].tolist(), strict=True))
    heap: list[int] = []
    by_due, following = [], 0
    for place in range(size):
        while following < size and waiting[following][0] <= place:
            heapq.heappush(heap, waiting[following][1])
            following += 1
        by_due.append(heapq.heappop(heap) % size)
    return sources[by_due], opens[by_due], closes[by_due]


_Node = int | tuple["_Node", "_Node", int, int]
"""A source, or (left, right, weight of the left, weight of both)."""


def _tree(weights: Sequence[int]) -> _Node:
    """Build Huffman's tree (1952): join the two lightest nodes until one is left."""
    heap: list[tuple[int, int, _Node]] = [(weight, at, at) for at, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    while len(heap) > 1:
        light, at, lighter = heapq.heappop(heap)
        heavy, _, heavier = heapq.heappop(heap)
        heapq.heappush(heap, (light + heavy, at, (lighter, heavier, light, light + heavy)))
    return heap[0][2]


def _count(node: _Node, places: int, counts: list[int]) -> None:
    """Add the items of each source in the first `places` places below a node."""
    if isinstance(node, int):
        counts[node] += places
        return
    left, right, light, both = node
    left_places = (2 * places * light + both) // (2 * both)
    _count(left, left_places, counts)
    _count(right, places - left_places, counts)
