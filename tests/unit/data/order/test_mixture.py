"""Mixtures: proportions at every place, restarts anywhere, new weights, what is held out, which rank sees what."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import StepLoader
from data.order.mixture import MOST_IN_TABLE, Mixture, Phases, whole_weights
from data.order.packing import Packing
from data.order.sources import MixedOrder, Part, Source, fingerprint_of, held_rows
from data.order.step import Batching, Reader
from tests.tars import write_tar
from tests.unit.data.helpers import chat, images


def worst_error(weights, sources, first=0, before=None):
    """Largest difference of a source's count from its exact share, over all places."""
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0) + (0 if before is None else before)
    places, total = np.arange(1, len(sources) + 1)[:, None] + first, sum(weights)
    return (np.abs(counts * total - places * np.array(weights)) / total).max()


@settings(max_examples=25)
@given(
    weights=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 2**63),
    start=st.integers(0, 10**9),
)
def test_proportions_are_within_one_sample_at_every_place_and_no_item_is_missed(weights, seed, start):
    weights = whole_weights(weights)
    mixture = Mixture(weights, seed)
    sources, items = mixture.items(np.arange(start, start + 1500))
    before = mixture.counts(start)
    assert worst_error(weights, sources, start, before) < 1
    for source, count in enumerate(before):
        own = items[sources == source]
        assert own.tolist() == list(range(count, count + len(own)))
    assert mixture.counts(start + 1500) == [n + int((sources == at).sum()) for at, n in enumerate(before)]


@pytest.mark.parametrize("sizes", [(1000, 500, 90), (700_001, 40_003, 777, 3), (50_000, 50_001)])
def test_sizes_as_weights_end_every_source_with_the_epoch(sizes):
    total, weights = sum(sizes), whole_weights(sizes)
    mixture = Mixture(weights)
    for epoch in (1, 5):
        assert mixture.counts(epoch * total) == [epoch * size for size in sizes]
    first = 3 * total - 3000
    sources, _ = mixture.items(np.arange(first, first + 6000))
    assert worst_error(weights, sources, first, mixture.counts(first)) < (1 if sum(weights) <= MOST_IN_TABLE else 3)


def test_weights_are_exact_decimals_and_reduced():
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1) and whole_weights([2, 4.0]) == (1, 2)
    assert whole_weights([Fraction(1, 3), 1]) == (1, 3) and whole_weights([1e-7, 1]) == (1, 10**7)
    huge = whole_weights([10**12, 1, 3 * 10**12])
    assert sum(huge) <= 2**31 and huge[1] == 1 and abs(huge[0] / sum(huge) - 0.25) < 1e-8


@pytest.mark.parametrize(
    ("weights", "microbatch", "dp"), [((1, 1, 1, 1), 1, 4), ((7, 2, 1), 5, 2), ((35, 10, 4, 1), 1, 10), ((1, 1), 1, 2)]
)
def test_every_rank_sees_every_source(weights, microbatch, dp):
    steps = 500
    sources, _ = Mixture(weights, seed=1).items(np.arange(steps * dp * microbatch))
    of_rank = sources.reshape(steps, dp, microbatch)
    for rank in range(dp):
        shares = np.bincount(of_rank[:, rank].ravel(), minlength=len(weights)) * sum(weights) / steps / microbatch
        assert (shares > 0.2 * np.array(weights)).all(), (rank, shares)


def test_patterns_do_not_change_between_releases():
    # A change here moves every mixed run that resumes from an older checkpoint to another order.
    sources, _ = Mixture((7, 2, 1), seed=1234).items(np.arange(5000, 5020))
    assert sources.tolist() == PINNED
    sources, _ = Mixture((700_001, 400_003), seed=1).items(np.arange(10**9, 10**9 + 20))
    assert sources.tolist() == PINNED_TREE


PINNED = [1, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 2, 0, 1, 0, 0, 1, 0, 0, 0]
PINNED_TREE = [1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0]


def test_places_of_items():
    phases = Phases([(0, (7, 2, 1)), (2000, (1, 0, 0))])
    for source, items in ((0, 1000), (1, 150), (0, 2500)):
        places = phases.places_of(source, items)
        assert phases.counts(places)[source] == items
        assert [int(values[0]) for values in phases.items(np.array([places - 1]))] == [source, items - 1]
    assert phases.places_of(1, 500) is None
    paused = Phases([(0, (1, 1)), (1500, (0, 1))])
    assert paused.counts(paused.places_of(0, 700))[0] == 700 and paused.places_of(0, 751) is None


@pytest.mark.parametrize(
    ("sizes", "phases"),
    [
        ((600, 100_000), [(0, (1, 1)), (1500, (0, 1))]),  # exhausted, and then paused
        ((1000, 10), [(0, (100, 1))]),
        ((30, 50, 20), []),
        ((7,), []),
    ],
)
def test_a_source_is_exhausted_where_its_next_sample_would_be_drawn_a_second_time(sizes, phases):
    order = MixedOrder([Part(sum(sizes[:at]), size) for at, size in enumerate(sizes)], phases)
    rows = order.rows(np.arange(3000)).tolist()
    repeats = next(at for at, row in enumerate(rows) if row in rows[:at])
    source, numbers = order.exhausted()
    assert numbers == repeats and source == order.sources(np.array([repeats]))[0]


@settings(max_examples=40)
@given(data=st.data())
def test_any_cuts_layouts_and_weights_give_the_sequence_of_the_uninterrupted_run(data):
    """What a run does, without its processes: steps of a growing batch, cut into ranks' slices of microbatches, from
    orders that are made anew at every start, with weights that are changed at some of them."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weight_lists = st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)).filter(any)
    parts, first = [], 0
    for size in sizes:
        held = sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1)))
        parts.append(Part(first, size, np.array(held, dtype=np.int64) if held else None))
        first += size
    seed, phases = data.draw(st.integers(0, 2**40)), [(0, whole_weights(data.draw(weight_lists)))]
    done, trained = 0, []
    for _ in range(data.draw(st.integers(1, 4))):  # starts
        order = MixedOrder(parts, phases, seed)
        dp = data.draw(st.sampled_from([1, 2, 4]))
        for of_rank in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)):  # steps
            numbers = np.arange(done, done + dp * of_rank)
            trained += [row for rank in range(dp) for row in order.rows(numbers[rank * of_rank :][:of_rank]).tolist()]
            done += dp * of_rank
            counts, (begin, weights) = np.array(order.counts(done)), phases[-1]
            exact = (done - begin) * np.array(weights) / sum(weights)
            assert (np.abs(counts - order.counts(begin) - exact) < 1).all()
        if data.draw(st.booleans()):
            phases = [*phases, (done, whole_weights(data.draw(weight_lists)))]
    whole = MixedOrder(parts, phases, seed)
    assert trained == whole.rows(np.arange(done)).tolist() == [whole.row(number) for number in range(done)]
    for source, part in enumerate(parts):  # each sample of an epoch of a source once, none that is held out
        mine = [row for row, of in zip(trained, whole.sources(np.arange(done)), strict=True) if of == source]
        held = [] if part.held is None else part.held.tolist()
        kept = {part.first + row for row in range(part.rows) if row not in held}
        for epoch in range(len(mine) // part.size):
            assert sorted(mine[epoch * part.size :][: part.size]) == sorted(kept)
        rest = mine[len(mine) // part.size * part.size :]
        assert len(set(rest)) == len(rest) and set(rest) <= kept


@pytest.fixture
def two(tmp_path, dataset):
    """A dataset of two sources, 10 samples `a...` and 6 samples `b...`, the last of these bad."""
    for name, count in (("a", 10), ("b", 6)):
        records = [chat(f"q{n}", f"{name}{n}") if (name, n) != ("b", 5) else b"{" for n in range(count)]
        write_tar(tmp_path / f"{name}.tar", [(f"{name}{n}.json", record) for n, record in enumerate(records)])

    def make(weights=(3, 1), **options):
        sources = [Source(name, tmp_path / f"{name}.tar", weight=w) for name, w in zip("ab", weights, strict=True)]
        return dataset(sources, media=(images(),), **options)

    return make


def test_the_loader_gives_each_row_its_source_and_a_bad_sample_names_it(two, caplog):
    data = two(max_bad_samples=3)
    readers = [[Reader("language", rank, 2)] for rank in (0, 1)]
    loaders = [StepLoader(data, Batching(8, 4), one, workers=0, limit=4) for one in readers]
    for step in zip(*loaders, strict=True):
        for microbatch in (microbatch for rank in step for microbatch in rank.microbatches):
            keys = [data.locate(number)[1] for number in microbatch["sample_numbers"].tolist()]
            sources = microbatch["sources"]
            assert sources.shape == microbatch["input_ids"].shape and (sources == sources[:, :1]).all()
            assert ["ab"[source] for source in sources[:, 0].tolist()] == [key[0] for key in keys]
    assert data.order.counts(32) == [24, 8] and data.order.sizes == [10, 6] and len(data) == 16
    assert "b.tar of b, key 'b5'" in caplog.text
    assert data.order.exhausted()[0] == 0 and data.order.counts(data.order.exhausted()[1])[0] == 10


def test_a_packed_row_without_samples_has_sources_of_padding(two):
    """Fewer samples than rows, whose number is a multiple: some of them are padding alone."""
    data = two(weights=(1, 1), max_bad_samples=9)
    data.lengths = np.full(16, 9, dtype=np.int32)
    batching = Batching(4, 4, replicas=4, padding=Packing(24, microbatches=2))
    plan = batching.plan(0, 4, data.plan_step(0, 4).lengths, 24)
    assert [[len(share.places) for share in shares] for shares in plan.shares] == [[1] * 4, [0] * 4]
    loader = StepLoader(data, batching, [Reader("language", 3, 4)], workers=0, limit=1)
    sources = next(loader).microbatches[1]["sources"]
    assert sources.dtype == torch.int64 and not sources.any() and sources.shape == (1, plan.shares[1][3].length)


def test_sizes_are_the_weights_where_there_are_none_and_one_source_is_the_plain_order(two, tmp_path, dataset):
    assert two((None, None)).order.counts(16) == [10, 6]
    plain = dataset(tmp_path / "a.tar", seed=5)
    held = dataset(tmp_path / "a.tar", seed=5, held_fraction=0.01)
    assert held.order.sizes == [10] and held.fingerprint != plain.fingerprint
    assert [held.locate(n) for n in range(25)] == [plain.locate(n) for n in range(25)]
    mixed = two((1, 0), seed=5)
    assert [mixed.locate(n) for n in range(25)] == [plain.locate(n) for n in range(25)]
    assert (
        len({plain.fingerprint, mixed.fingerprint, dataset([tmp_path / "a.tar", tmp_path / "b.tar"]).fingerprint}) == 3
    )


def test_what_is_held_out_is_never_trained_and_does_not_move_when_shards_are_added(two, tmp_path, dataset):
    train, held = two(held_fraction=0.4), two(held_fraction=0.4, only_held=True, shuffle=False)
    keys = [{one.locate(n)[1] for n in range(6 * len(one))} for one in (train, held)]
    assert keys[0] | keys[1] == {f"a{n}" for n in range(10)} | {f"b{n}" for n in range(6)}
    assert not keys[0] & keys[1] and len(keys[1]) == len(held) >= 2
    alone = dataset(tmp_path / "b.tar", held_fraction=0.4, only_held=True)
    assert {alone.locate(n)[1] for n in range(len(alone))} == {key for key in keys[1] if key[0] == "b"}
    assert abs(len(held_rows("x", 100_000, 0.05)) - 5000) < 300
    with pytest.raises(DataError, match=r"data\.validation_fraction: 1e-09 holds out none of the 10"):
        dataset(tmp_path / "a.tar", held_fraction=1e-9, only_held=True)


def test_a_fingerprint_stays_what_it_was():
    """A run that was begun with it goes on."""
    shards = [("a.tar", 10240, "0f", 3), ('b "2".tar', 20480, "1e", 7)]
    assert fingerprint_of(shards, [2], 0.0) == "c38a54d77c457d1a39830397a244d852"
    assert fingerprint_of(shards, [1, 2], 0.1) == "69909f9bc7780073e8f9cb4d715ede2e"


def test_outlines_follow_other_weights(two):
    data = two(weights=(1, 1), max_bad_samples=9)

    def keys() -> list[str]:
        return [str(data.meta(number).key) for number in range(8)]

    assert {key[0] for key in keys()} == {"a", "b"}
    data.set_phases([(0, (0, 1))])
    assert {key[0] for key in keys()} == {"b"}
    assert keys() == [data.locate(number)[1] for number in range(8)]
