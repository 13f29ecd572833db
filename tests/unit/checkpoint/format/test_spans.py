"""Ranges of boxes: what two have in common is what counting every element gives."""

from itertools import product
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_train.checkpoint.format.spans import Span, common_range, copy_common


@st.composite
def spans_of_one_tensor(draw) -> tuple[Span, Span]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))

    def span() -> Span:
        offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
        size = tuple(draw(st.integers(1, of - at)) for of, at in zip(shape, offset, strict=True))
        start = draw(st.integers(0, prod(size) - 1))
        return Span(shape, offset, size, start, draw(st.integers(start + 1, prod(size))))

    return span(), span()


def elements(span: Span) -> list[int]:
    """Numbers of the elements in the whole tensor, in the order of the span."""
    places = product(*(range(offset, offset + size) for offset, size in zip(span.offset, span.size, strict=True)))
    numbers = []
    for place in places:
        number = 0
        for index, size in zip(place, span.shape, strict=True):
            number = number * size + index
        numbers.append(number)
    return numbers[span.start : span.stop]


@settings(max_examples=300, deadline=None)
@given(spans_of_one_tensor())
def test_what_two_spans_share_is_copied_and_nothing_else(pair):
    wanted, stored = pair
    mine, there = elements(wanted), elements(stored)
    both = set(mine) & set(there)
    into = torch.full((wanted.numel,), -1)
    assert copy_common(wanted, into, stored, torch.tensor(there)) == len(both)
    assert into.tolist() == [number if number in both else -1 for number in mine]


@settings(max_examples=300, deadline=None)
@given(spans_of_one_tensor())
def test_the_common_range_is_the_shortest_with_all_of_it(pair):
    wanted, stored = pair
    both = set(elements(wanted))
    places = [stored.start + at for at, number in enumerate(elements(stored)) if number in both]
    assert common_range(wanted, stored) == ((min(places), max(places) + 1) if places else None)
