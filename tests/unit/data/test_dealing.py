"""Samples of a packed step over data-parallel ranks: each once, tokens and attention even, or at least their sum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order.packing import deal
from tests.unit.data.test_packing import PAIR, text


def busiest(own: list[list[int]], work: np.ndarray) -> float:
    """The most over the mean."""
    of_ranks = [work[places].sum() for places in own]
    return max(of_ranks) / (sum(of_ranks) / len(own))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=80),
    ranks=st.integers(1, 9),
    pair=st.sampled_from([0.0, 1e-4, 0.1]),
)
def test_every_sample_has_one_rank_and_always_the_same(lengths, ranks, pair):
    tokens = np.array(lengths, dtype=np.int64)
    own = deal(tokens, tokens**2, ranks, pair)
    assert len(own) == ranks and sorted(sum(own, [])) == list(range(len(lengths)))
    assert deal(tokens.copy(), tokens.copy() ** 2, ranks, pair) == own


def test_long_documents_and_many_short_ones_are_both_spread():
    # By tokens alone, a rank may have one long sample and another all of the short ones.
    tokens = np.array([1000] * 4 + [100] * 40, dtype=np.int64)
    own = deal(tokens, tokens**2, 4)
    assert [(tokens[places] == 1000).sum() for places in own] == [1, 1, 1, 1]
    assert busiest(own, tokens) == busiest(own, tokens**2) == 1


@pytest.mark.parametrize("seed", range(6))
def test_both_kinds_of_work_are_within_a_twentieth_of_even(seed):
    lengths = text(256, seed)
    assert busiest(deal(lengths, lengths**2, 4), lengths) <= 1.05
    assert busiest(deal(lengths, lengths**2, 4), lengths**2) <= 1.05


@pytest.mark.parametrize("hidden", [128, 1024])
def test_one_sample_of_more_attention_than_a_rank_s_part_leaves_the_whole_work_even(hidden):
    pair = PAIR * 1024 / hidden
    lengths = np.array([2048] + [100] * 400, dtype=np.int64)
    own = deal(lengths, lengths**2, 8, pair)
    assert busiest(own, lengths**2) > 2, "the long sample has more than a rank's part by itself"
    assert busiest(own, lengths + pair * lengths**2) <= 1.03
    assert sum(lengths[next(places for places in own if 0 in places)]) < lengths.sum() / 8, "it has fewer tokens for it"


def test_samples_of_many_documents_count_with_the_squares_of_these():
    lengths = np.full(16, 1000, dtype=np.int64)
    squares = np.array([1000**2] * 4 + [10 * 100**2] * 12)
    own = deal(lengths, squares, 4)
    assert [sum(place < 4 for place in places) for places in own] == [1, 1, 1, 1]
