"""Which data-parallel rank of the language model trains which samples of a packed step, so that all have as much to do.
Arithmetic on planned lengths in whole numbers, which is the same on every machine; imports no torch."""

from __future__ import annotations

import heapq

import numpy as np

_MEAN = 1 << 30
"""A rank's part of a quantity, if all had as much, in the whole numbers that are added up here."""

_EVEN = 1.045
"""What the busiest rank has over the mean that is even enough."""

_PARTNERS = 3
"""With how many ranks the busiest one tries to exchange samples, those with the least first."""


def deal(lengths: np.ndarray, squares: np.ndarray, ranks: int, pair: float = 0.0) -> list[list[int]]:
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
    """int64 [samples], in that of one token outside of attention; arguments as those of `deal`."""
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
