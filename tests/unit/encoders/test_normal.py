"""Normal numbers of initial weights: any part is that of the whole, on any machine."""

import hashlib
import math
from statistics import NormalDist

import numpy
import pytest
import torch

from encoders import initial_weights
from encoders.initial_weights import Normal, fill

WHOLE = (700, 300)


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    weight = torch.empty(WHOLE)
    fill(weight, 1.0, seed=9)
    return weight


@pytest.mark.parametrize(
    ("row", "column", "rows", "columns"),
    [(0, 0, 700, 300), (0, 64, 256, 64), (77, 50, 333, 111), (699, 299, 1, 1), (256, 127, 300, 2), (1, 0, 699, 64)],
)
def test_a_part_is_that_of_the_whole(whole, row, column, rows, columns):
    part = torch.full((rows, columns), math.nan)
    fill(part, 1.0, seed=9, row=row, column=column)
    assert torch.equal(part, whole[row : row + rows, column : column + columns])


def test_only_the_strips_of_a_part_are_drawn(monkeypatch):
    drawn = []
    original = initial_weights._normal
    monkeypatch.setattr(initial_weights, "_normal", lambda *given: drawn.append(given[1]) or original(*given))
    fill(torch.empty(500, 100), 1.0, seed=9, row=10_000_000, column=64 * 1000 + 10)
    assert sum(drawn) == 500 * 2 * 64


def test_every_machine_draws_the_same_bits(whole):
    digest = hashlib.sha256(whole.numpy().astype("<f4").tobytes()).hexdigest()
    assert digest[:16] == "d8a8ed42168807d1", whole[0, :4].tolist()


def test_strides_and_types_change_nothing_but_the_rounding(whole):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.empty(WHOLE[::-1], dtype=dtype).t()
        fill(weight, 0.5, seed=9)
        assert torch.equal(weight, (whole * 0.5).to(dtype))


class Words:
    """A stream of chosen bits."""

    def __init__(self, words: list[int]):
        self._words = words

    def random_raw(self, count: int) -> numpy.ndarray:
        low, high = self._words[::2], self._words[1::2]
        return numpy.array([a | b << 32 for a, b in zip(low, high, strict=True)], dtype=numpy.uint64)


def test_numbers_are_the_inverse_of_the_normal_distribution():
    generator = torch.Generator().manual_seed(1)
    uniform = torch.randint(0, 2**31, (20_000,), generator=generator).tolist()
    near_0 = [2**power + step for power in range(2, 31) for step in (-1, 0, 1)]
    words = [*uniform, *near_0, 0, 1, 2**31 - 1, 2**31 - 2]
    words += [] if len(words) % 2 == 0 else [5]
    positive = initial_weights._normal(Words(words), len(words), 1.0)
    exact = [-NormalDist().inv_cdf((word | 1) / 2**32) for word in words]
    assert numpy.abs(positive - numpy.array(exact)).max() < 3e-6
    negative = initial_weights._normal(Words([word | 2**31 for word in words]), len(words), 1.0)
    assert numpy.array_equal(negative, -positive)
    assert positive.max() < 6.24 and positive.min() == 0


def test_numbers_are_normal_and_do_not_depend_on_each_other():
    first, second = torch.empty(4096, 256), torch.empty(4096, 256)
    fill(first, 1.0, seed=3)
    fill(second, 1.0, seed=4)
    ordered = first.double().flatten().sort().values
    count = len(ordered)
    distance = (torch.special.ndtr(ordered) - torch.arange(1, count + 1) / count).abs().max() * count**0.5
    assert distance < 1.95, "Kolmogorov-Smirnov, 0.1 %"
    for one, other in (
        (first, second),
        (first[1:], first[:-1]),
        (first[:, 64:], first[:, :-64]),
        (first[:, 1:], first[:, :-1]),
    ):
        correlation = (one * other).double().mean() * one.numel() ** 0.5
        assert abs(correlation) < 4.5


def test_a_weight_takes_its_seed_from_the_generator_of_its_layer():
    init = Normal(0.02)
    torch.manual_seed(5)
    weights = [init(torch.empty(shape)) for shape in ((8, 130), (8, 130), (3, 5, 70), (200,), (1, 2), (0,))]
    assert not torch.equal(weights[0], weights[1])
    assert all(0.01 < float(weight.std()) < 0.03 for weight in weights[:4])
    assert len(torch.cat([weight.flatten() for weight in weights]).unique()) == sum(map(torch.numel, weights))
    torch.manual_seed(5)
    assert torch.equal(init(torch.empty(8, 130)), weights[0])
    parts = [torch.empty(8, 65) for _ in range(2)]
    for rank, part in enumerate(parts):
        torch.manual_seed(5)
        init.draw_part(part, dim=1, rank=rank, ranks=2)
    assert torch.equal(torch.cat(parts, dim=1), weights[0])


def test_a_parameter_that_is_trained_or_lies_across_memory_is_drawn():
    parameter = torch.nn.Parameter(torch.full((3, 4, 5), math.nan).transpose(0, 2))
    Normal(1.0)(parameter)
    assert parameter.isfinite().all() and parameter.grad_fn is None
