"""Places of elements in whole tensors, by numpy."""

import math

import numpy as np
import pytest
import torch

from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.frozen_base import _places


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
