"""How the samples of a microbatch are divided over the data-parallel ranks of a module: contiguous, in order."""

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
