"""Packs of a step: every sample once, no row over its budget, little padding, and the same work for every rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order.packing import Packing, balance_ranks, plan_in_packs
from data.order.step_plan import StepPlan


def plan(lengths, replicas=1, **options) -> StepPlan:
    return plan_in_packs(7, np.array(lengths), replicas, Packing(**options))


def text(samples: int, seed: int) -> np.ndarray:
    """Tokens of texts of 350 on average, a few of them cut at 2,048."""
    drawn = np.random.default_rng(seed).lognormal(np.log(350) - 0.9**2 / 2, 0.9, samples)
    return np.clip(drawn, 8, 2048).astype(np.int64)


def mixed(samples: int, seed: int) -> np.ndarray:
    """Tokens of texts with 0 to 4 images of many sizes."""
    draw = np.random.default_rng(seed)
    images = draw.choice([0, 1, 2, 4], samples, p=[0.2, 0.6, 0.15, 0.05])
    sizes = [draw.choice([144, 196, 256, 324, 400, 484, 576], each).sum() for each in images]
    return np.minimum(text(samples, seed + 1000) + np.array(sizes), 2048)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    budget=st.integers(64, 200),
    replicas=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    unit=st.sampled_from([1, 2, 4, 6, 48]),
    equal=st.booleans(),
)
def test_every_sample_is_in_one_row_that_has_room_for_it(lengths, budget, replicas, microbatches, unit, equal):
    found = plan(lengths, replicas, budget=budget, unit=unit, microbatches=microbatches, equal=equal)
    assert (found.first, found.size, found.packed) == (7, len(lengths), True)
    assert len(found.shares) % microbatches == 0 and {len(shares) for shares in found.shares} == {replicas}
    everyone = [share for shares in found.shares for share in shares]
    assert sorted(np.concatenate([share.places for share in everyone]).tolist()) == list(range(len(lengths)))
    for share in everyone:
        tokens = sum(lengths[place] for place in share.places)
        assert tokens <= budget and tokens <= share.length < tokens + 100 or equal
        assert share.length % unit == 0 and share.length > 0
        assert share.places.tolist() == sorted(share.places.tolist())
    if equal:
        assert all(len({share.length for share in shares}) == 1 for shares in found.shares)
    again = plan(lengths, replicas, budget=budget, unit=unit, microbatches=microbatches, equal=equal)
    assert [[share.places.tolist() for share in shares] for shares in again.shares] == [
        [share.places.tolist() for share in shares] for shares in found.shares
    ]


def test_a_stand_in_without_tokens_is_a_document_of_padding():
    found = plan([5, 0, 3, 0], budget=8)
    assert found.lengths.tolist() == [5, 1, 3, 1]
    assert plan([0, 0], budget=8).lengths.tolist() == [1, 1]


def balance(found: StepPlan, replicas: int, work) -> float:
    """Work of the busiest data-parallel rank over the mean."""
    of_ranks = [sum(work(shares[rank].places) for shares in found.shares) for rank in range(replicas)]
    return max(of_ranks) / (sum(of_ranks) / replicas)


PAIR = 1 / 12 / 1024
"""Work of a pair of tokens over that of a token, of a language model of hidden size 1024: 2h / 24h^2."""


@pytest.mark.parametrize("kind", [text, mixed])
@pytest.mark.parametrize(("samples", "replicas"), [(256, 1), (256, 4), (256, 8), (256, 16), (1024, 16), (1024, 64)])
@pytest.mark.parametrize("budget", [2048, 8192])
def test_rows_are_full_and_ranks_have_as_much_to_do(kind, samples, replicas, budget):
    for seed in range(4):
        lengths = kind(samples, seed)
        found = plan(lengths, replicas, budget=budget, pair=PAIR)
        assert lengths.sum() / found.positions >= 0.975
        tokens, squares = (balance(found, replicas, lambda places: of[places].sum()) for of in (lengths, lengths**2))  # noqa: B023
        assert tokens <= 1.05
        assert balance(found, replicas, lambda places: (lengths + PAIR * lengths**2)[places].sum()) <= 1.05  # noqa: B023
        if kind is mixed or samples >= 64 * replicas:
            assert squares <= 1.05
        least = replicas * -(-lengths.sum() // (budget * replicas))
        assert len(found.shares) * replicas <= 1.25 * least + replicas, "few packs more than tokens need"


def test_the_packs_of_a_microbatch_cost_about_as_much():
    lengths = text(1024, 0)
    for shares in plan(lengths, 4, budget=4096, pair=PAIR).shares:
        work = [(lengths + PAIR * lengths**2)[share.places].sum() for share in shares]
        assert max(work) <= 1.1 * min(work)


def test_a_step_with_fewer_samples_than_ranks_has_rows_of_padding():
    found = plan([5, 3], replicas=4, budget=64)
    assert [len(share.places) for share in found.shares[0]].count(0) == 2
    assert {share.length for share in found.shares[0]} == {32}


def busiest(own: list[list[int]], work: np.ndarray) -> float:
    """The most over the mean."""
    of_ranks = [work[places].sum() for places in own]
    return max(of_ranks) / (sum(of_ranks) / len(own))


def test_long_documents_and_many_short_ones_are_both_spread():
    # By tokens alone, a rank may have one long sample and another all of the short ones.
    tokens = np.array([1000] * 4 + [100] * 40, dtype=np.int64)
    own = balance_ranks(tokens, tokens**2, 4)
    assert [(tokens[places] == 1000).sum() for places in own] == [1, 1, 1, 1]
    assert busiest(own, tokens) == busiest(own, tokens**2) == 1


@pytest.mark.parametrize("hidden", [128, 1024])
def test_one_sample_of_more_attention_than_a_rank_s_part_leaves_the_whole_work_even(hidden):
    pair = PAIR * 1024 / hidden
    lengths = np.array([2048] + [100] * 400, dtype=np.int64)
    own = balance_ranks(lengths, lengths**2, 8, pair)
    assert busiest(own, lengths**2) > 2, "the long sample has more than a rank's part by itself"
    assert busiest(own, lengths + pair * lengths**2) <= 1.03
    assert sum(lengths[next(places for places in own if 0 in places)]) < lengths.sum() / 8, "it has fewer tokens for it"


def test_samples_of_many_documents_count_with_the_squares_of_these():
    lengths = np.full(16, 1000, dtype=np.int64)
    squares = np.array([1000**2] * 4 + [10 * 100**2] * 12)
    own = balance_ranks(lengths, squares, 4)
    assert [sum(place < 4 for place in places) for places in own] == [1, 1, 1, 1]
