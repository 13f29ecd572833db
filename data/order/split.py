"""How the samples of a microbatch are divided over the data-parallel ranks of a module: contiguous, and in the order of
ranks but in `spread_parts`."""

from collections.abc import Sequence

Span = tuple[int, int]
"""Samples [first, last) of a microbatch."""


def equal_parts(samples: int, parts: int) -> list[Span]:
    """`parts` equal spans; `parts` must divide `samples`."""
    assert samples % parts == 0, (samples, parts)
    share = samples // parts
    return [(part * share, (part + 1) * share) for part in range(parts)]


def balanced_parts(loads: Sequence[int], parts: int) -> list[Span]:
    """Spans whose largest load is as small as contiguous spans allow; some may be empty.

    The least capacity that suffices is found by bisection, and every span is filled up to it, as long as the others
    could still be filled (the linear partition problem; Skiena, The Algorithm Design Manual, 10.7).
    """
    low, high = max([*loads, -(-sum(loads) // parts)]), sum(loads)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(loads, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    spans = _filled(loads, low)
    end = spans[-1][1] if spans else 0
    return spans + [(end, end)] * (parts - len(spans))


def spread_parts(loads: Sequence[Sequence[int]], parts: int) -> list[list[Span]]:
    """`balanced_parts` of every microbatch, of which the rank with the least so far has the largest: over all of them
    ranks have about as much.

    Args:
        loads: microbatch -> sample -> load.

    Returns:
        microbatch -> rank -> span.
    """
    so_far = [0] * parts
    found = []
    for of_samples in loads:
        spans = balanced_parts(of_samples, parts) if of_samples else [(0, 0)] * parts
        work = [sum(of_samples[first:last]) for first, last in spans]
        largest_first = sorted(range(parts), key=work.__getitem__, reverse=True)
        of_ranks = [(0, 0)] * parts
        for rank, part in zip(sorted(range(parts), key=so_far.__getitem__), largest_first, strict=True):
            of_ranks[rank] = spans[part]
            so_far[rank] += work[part]
        found.append(of_ranks)
    return found


def _filled(loads: Sequence[int], capacity: int) -> list[Span]:
    """Spans that each take samples while their load stays within `capacity`."""
    spans, first, load = [], 0, 0
    for sample, own in enumerate(loads):
        if load + own > capacity:
            spans.append((first, sample))
            first, load = sample, 0
        load += own
    if first < len(loads):
        spans.append((first, len(loads)))
    return spans
