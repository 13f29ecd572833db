"""Samples of a microbatch over data-parallel ranks."""

import random
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from data.order.step_plan import balanced_parts, equal_parts, spread_parts


def test_equal_parts():
    assert equal_parts(6, 3) == [(0, 2), (2, 4), (4, 6)]


def test_a_heavy_sample_stands_alone():
    assert balanced_parts([1, 1, 9, 1], 3) == [(0, 2), (2, 3), (3, 4)]


def test_nothing_to_do_is_divided_too():
    assert balanced_parts([0, 0, 0], 2) == [(0, 3), (3, 3)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
@settings(max_examples=200)
def test_balanced_parts_are_contiguous_and_no_others_are_better(loads, parts):
    spans = balanced_parts(loads, parts)
    assert len(spans) == parts and spans[0][0] == 0 and spans[-1][1] == len(loads)
    assert all(before[1] == after[0] for before, after in pairwise(spans))

    def worst(cuts) -> int:
        return max(sum(loads[first:last]) for first, last in pairwise((0, *cuts, len(loads))))

    best = min(
        worst(cuts) for count in range(min(parts, len(loads))) for cuts in combinations(range(1, len(loads)), count)
    )
    assert max(sum(loads[first:last]) for first, last in spans) == best


def test_spread_parts_are_balanced_over_the_microbatches_together():
    draw = random.Random(0)
    loads = [[draw.choice([0, 0, 144, 256, 400, 576]) for _ in range(10)] for _ in range(24)]

    def busiest(spread) -> float:
        work = [
            sum(sum(of[first:last]) for of, (first, last) in zip(loads, spans, strict=True))
            for spans in zip(*spread, strict=True)
        ]
        return max(work) * len(work) / sum(work)

    spread = spread_parts([*loads, []], 4)
    assert spread.pop() == [(0, 0)] * 4
    in_order = [balanced_parts(of, 4) for of in loads]
    assert [sorted(spans) for spans in spread] == [sorted(spans) for spans in in_order]
    assert busiest(spread) < 1.02 < 1.1 < busiest(in_order)
