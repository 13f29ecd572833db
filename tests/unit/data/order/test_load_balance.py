"""Which rank computes each media item, and how rows of features find their samples again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order.load_balance import MediaItems, item_per_sample, routes_of
from data.order.packing import Packing, plan_in_packs
from data.order.step_plan import Padding, plan_by_length


def drawn_items(draw: np.random.Generator, samples: int, most: int) -> MediaItems:
    """Up to `most` items of every sample, of any size, some without rows, some parts of a video."""
    counts = draw.integers(0, most + 1, samples)
    places = np.repeat(np.arange(samples), counts)
    numbers = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(count) for count in counts)])
    tokens, loads = draw.integers(0, 6, len(places)), draw.integers(1, 20, len(places))
    parts = np.where(draw.integers(0, 2, samples), counts, 1)[places]
    return MediaItems(places, numbers, tokens, loads, loads + loads**2 // 8, parts)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans())
def test_every_destination_has_its_rows_in_the_order_of_its_samples(seed, sources, replicas, together, packed):
    draw = np.random.default_rng(seed)
    lengths, items = draw.integers(1, 60, 24), drawn_items(draw, 24, draw.integers(0, 4))
    plan = (
        plan_in_packs(0, lengths, replicas, Packing(100))
        if packed
        else plan_by_length(0, lengths, 8, replicas, 60, Padding())
    )
    by_items = packed or sources not in (1, 2, 4) or bool(draw.integers(2))
    rows_of = {  # the rows of a sample, each of them known by its sample, item and number
        place: [
            (place, number, row)
            for number, rows in zip(items[mine].numbers, items[mine].tokens, strict=True)
            for row in range(rows)
        ]
        for place in range(24)
        for mine in [items.places == place]
    }
    for microbatch, routes in enumerate(routes_of(items, plan, sources, by_items, together)):
        sent: list[list[list]] = []
        for source in range(sources):
            computed = routes.items[routes.sources == source]
            columns = zip(computed.places, computed.numbers, computed.tokens, strict=True)
            rows = [(place, number, row) for place, number, count in columns for row in range(count)]
            ends = np.cumsum([0, *routes.sent(source, replicas)])
            assert ends[-1] == len(rows)
            sent.append([rows[first:last] for first, last in zip(ends, ends[1:], strict=False)])
        for replica, share in enumerate(plan.shares[microbatch]):
            came = [row for source in range(sources) for row in sent[source][replica]]
            assert routes.received(replica, sources).tolist() == [len(sent[at][replica]) for at in range(sources)]
            order = routes.order(replica)
            in_order = came if order is None else [came[at] for at in order]
            assert in_order == [row for place in share.places.tolist() for row in rows_of[place]]
            assert order is None or len(set(order.tolist())) == len(came)
            if not by_items:
                assert order is None, "samples in a row need no other order"
        assert routes.work(sources).sum() == routes.items.work.sum()


def test_samples_are_divided_into_equal_runs():
    plan = plan_by_length(0, np.full(8, 5), 8, 2, 8, Padding())
    (routes,) = routes_of(item_per_sample(np.array([3, 0, 1, 0, 0, 2, 9, 9])), plan, 4, by_items=False)
    assert routes.sources.tolist() == [0, 1, 2, 3, 3] and routes.destinations.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(("together", "most"), [(1, 1.12), (2, 1.04), (4, 1.02)])
def test_single_items_balance_each_pass_and_the_whole_step(together, most):
    draw = np.random.default_rng(0)
    items = drawn_items(draw, 256, 3)
    items = replace(items, parts=np.ones_like(items.parts))
    plan = plan_by_length(0, np.full(256, 5), 32, 8, 8, Padding())
    routes = routes_of(items, plan, 8, True, together)
    passes = [sum(each.work(8) for each in routes[at : at + together]) for at in range(0, 8, together)]
    assert max(work.max() / work.mean() for work in passes) < most
    whole = sum(passes)
    assert whole.max() / whole.mean() < 1.01
    samples = [each.work(8) for each in routes_of(items, plan, 8, False)]
    assert min(work.max() / work.mean() for work in samples) > 1.2


def test_parts_of_a_video_fill_ranks_next_to_each_other():
    """A video of 40 times, one of 3, and images: each rank gets neighbours, and no rank more than a part too much."""
    counts, sizes, parts = np.array([40, 1, 3, 1]), np.array([10, 100, 30, 20]), np.array([40, 1, 3, 1])
    places, work, parts = (np.repeat(values, counts) for values in (np.arange(4), sizes, parts))
    numbers = np.concatenate([np.arange(count) for count in counts])
    plan = plan_by_length(0, np.full(4, 5), 4, 1, 8, Padding())
    (routes,) = routes_of(MediaItems(places, numbers, work, work, work, parts), plan, 4, by_items=True)
    loads = routes.work(4)
    assert loads.sum() == 610 and loads.max() <= 610 / 4 + 30
    of_film = routes.sources[routes.items.places == 0]
    assert (np.diff(of_film) != 0).sum() == len(set(of_film.tolist())) - 1 == 3
    (whole,) = routes_of(MediaItems(places, numbers, work, work, work, np.ones_like(parts)), plan, 4, by_items=True)
    assert (np.diff(whole.sources[whole.items.places == 0]) != 0).sum() > 10, "the largest first are not neighbours"


def test_a_pass_with_fewer_items_than_ranks_leaves_ranks_without_any():
    plan = plan_by_length(0, np.full(4, 5), 2, 1, 8, Padding())
    first, second = routes_of(item_per_sample(np.array([4, 0, 5, 6])), plan, 3, by_items=True)
    # The rank with work in the first pass has none in the second.
    assert sorted([*first.sources, *second.sources]) == [0, 1, 2]
