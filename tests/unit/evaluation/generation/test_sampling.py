"""Which tokens are drawn, how often, and what cannot be drawn from."""

import pytest
import torch

from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.answers import Sampler, distribution
from mimo_train.evaluation.generation.options import Sampling

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 2.0, -3.0])


def probabilities(logits: torch.Tensor, **options) -> dict[int, float]:
    left, tokens = distribution(logits, Sampling(**{"temperature": 1.0, **options}))
    assert float(left.sum()) == pytest.approx(1)
    return dict(zip(tokens.tolist(), left.tolist(), strict=True))


def drawn(count: int, logits: torch.Tensor = LOGITS, **options) -> list[int]:
    sampler = Sampler(Sampling(**options))
    return [sampler(logits) for _ in range(count)]


def test_all_tokens_have_the_probability_of_the_softmax():
    expected = LOGITS.double().div(0.7).softmax(0)
    assert probabilities(LOGITS, temperature=0.7) == pytest.approx(dict(enumerate(expected.tolist())))


def test_frequencies_are_the_probabilities():
    count = 20_000
    tokens, expected = drawn(count, temperature=1.3, top_k=4, top_p=0.9, seed=3), {1: 0.37, 4: 0.37, 3: 0.26}
    exact = probabilities(LOGITS, temperature=1.3, top_k=4, top_p=0.9)
    assert exact == pytest.approx(expected, abs=0.02)
    for token, probability in exact.items():
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(tokens.count(token) / count - probability) < 5 * deviation
    assert set(tokens) == set(exact)


def test_top_k_takes_that_many_and_the_lower_of_equal_ones():
    assert list(probabilities(LOGITS, top_k=1)) == [1]
    assert list(probabilities(LOGITS, top_k=3)) == [1, 4, 3]
    assert len(probabilities(LOGITS, top_k=100)) == len(LOGITS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_takes_the_smallest_set(seed, top_p):
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
    whole, left = probabilities(logits), probabilities(logits, top_p=top_p)
    chosen = sorted((whole[token] for token in left), reverse=True)
    assert sum(chosen) >= top_p > sum(chosen[:-1])
    assert min(chosen) >= max((whole[token] for token in whole.keys() - left), default=0)


def test_top_p_is_of_what_top_k_left():
    even = torch.zeros(4)
    # Of two tokens with a half each one is enough for 0.5; of four with a quarter, two.
    assert list(probabilities(even, top_k=2, top_p=0.5)) == [0]
    assert list(probabilities(even, top_p=0.5)) == [0, 1]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1e-300}, {"temperature": 5.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-9}]
)
def test_what_leaves_one_token_is_greedy(options):
    assert drawn(20, torch.tensor([-1e4, 3.0, 1e4, 2.0]), **options) == [2] * 20


def test_greedy_takes_the_lowest_of_equal_ones():
    assert drawn(1) == [1]


def test_a_seed_draws_the_same_tokens_and_none_draws_others():
    options = {"temperature": 2.0}
    assert drawn(40, seed=7, **options) == drawn(40, seed=7, **options) != drawn(40, seed=8, **options)
    assert drawn(40, **options) != drawn(40, **options)


def test_masked_tokens_are_never_drawn():
    masked = torch.tensor([0.0, -torch.inf, 0.1, -torch.inf])
    assert set(drawn(200, masked, temperature=50.0, seed=0)) == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_what_is_not_finite_is_no_answer(logits, temperature):
    with pytest.raises(UserError, match="not finite"):
        drawn(1, torch.tensor(logits), temperature=temperature)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"),
    ],
)
def test_options_out_of_range_are_named(options, named):
    with pytest.raises(UserError, match=named):
        Sampling(**options)
