"""Ranges of boxes: what two have in common is what counting every element gives."""

import math
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_train.checkpoint.format.spans import Span, common_range, copy_common
from mimo_train.checkpoint.frozen_base import _places


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


@pytest.mark.parametrize(
    ("shape", "offset", "size"), [((7, 5, 3), (2, 0, 1), (4, 5, 2)), ((9,), (3,), (4,)), ((2, 3), (1, 0), (1, 3))]
)
def test_elements_of_a_box_have_the_places_that_numpy_says(shape, offset, size):
    count = math.prod(size)
    coordinates = [first + at for first, at in zip(offset, np.indices(size).reshape(len(size), -1), strict=True)]
    expected = np.ravel_multi_index(coordinates, shape)
    span = Span(shape, offset, size, 0, count)
    for first in range(0, count, 3):  # piece by piece
        values = torch.zeros(min(3, count - first))
        assert _places(span, first, values).tolist() == expected[first : first + 3].tolist()
