import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order.order import GlobalOrder


def rows(order, numbers):
    return [order.row(number) for number in numbers]


PINNED = [0, 2, 8, 9, 4, 5, 7, 6, 1, 3, 4, 3, 8, 0, 2, 1, 5, 6, 9, 7]
PINNED_LARGE = 252684206072


@settings(max_examples=60)
@given(
    size=st.one_of(st.integers(1, 600), st.sampled_from([1000, 4096, 4097])),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_each_epoch_is_a_permutation(size, seed, epoch):
    numbers = range(size * epoch, size * (epoch + 1))
    assert sorted(rows(GlobalOrder(size, seed), numbers)) == list(range(size))


def test_epochs_and_seeds_differ():
    epochs = [range(50 * epoch, 50 * epoch + 50) for epoch in range(5)]
    assert len({tuple(rows(GlobalOrder(50, seed), epoch)) for seed in range(5) for epoch in epochs}) == 25


def test_values_do_not_change_between_processes_or_releases():
    # A change here moves every run that resumes from an older checkpoint to another order.
    assert rows(GlobalOrder(10, seed=1234), range(20)) == PINNED
    assert GlobalOrder(10**12, seed=7).row(123456789) == PINNED_LARGE


def test_every_row_comes_to_every_place():
    size, epochs = 10, 1500
    found = np.array(rows(GlobalOrder(size, seed=3), range(size * epochs))).reshape(epochs, size)
    counts = np.array([np.bincount(found[:, place], minlength=size) for place in range(size)])
    # Each count is binomial(1500, 0.1): mean 150, standard deviation 12.
    assert counts.min() > 95 and counts.max() < 205


def test_without_shuffle_rows_are_in_order():
    order = GlobalOrder(7, seed=3, shuffle=False)
    assert rows(order, range(15)) == [n % 7 for n in range(15)]


@settings(max_examples=60)
@given(size=st.integers(1, 300), block=st.integers(1, 320), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**30))
def test_rows_of_a_block_stay_together_and_each_epoch_is_a_permutation(size, block, seed, epoch):
    order, numbers = GlobalOrder(size, seed, block=block), np.arange(size * epoch, size * (epoch + 1))
    found = order.rows(numbers).tolist()
    assert sorted(found) == list(range(size)) and [order.row(int(number)) for number in numbers[:9]] == found[:9]
    starts = [at for at in range(size) if not at or found[at] // block != found[at - 1] // block]
    assert len(starts) == -(-size // block), "a block in two places"
    assert all(found[at] == found[at - 1] + 1 for at in range(1, size) if at not in starts)
    # Blocks come in the order that as many rows come in.
    blocks = GlobalOrder(-(-size // block), seed)
    assert [found[at] // block for at in starts] == [blocks.row(epoch * len(starts) + at) for at in range(len(starts))]


def test_a_block_of_one_row_is_no_block_and_large_orders_have_blocks_too():
    assert rows(GlobalOrder(10, seed=1234, block=1), range(20)) == PINNED
    order = GlobalOrder(10**12 + 7, seed=7, block=16)
    found = order.rows(np.arange(10**13, 10**13 + 4096))
    assert len(set((found // 16).tolist())) in (256, 257) and found.max() > 10**11
