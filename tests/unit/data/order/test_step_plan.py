"""The plan of a step: arrays that say what is known of each of its samples, and microbatches of similar lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.index.catalogue import open_catalogue
from data.media.options import Bounds
from data.order.order import GlobalOrder
from data.order.step_plan import Padding, plan_by_length, plan_in_order
from data.records.members import NO_FIELDS, read_fields
from data.samples.media_spec import Media
from data.samples.sample_meta import SampleTable
from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(1, 500), st.booleans(), st.integers(0, 3))
def test_rows_of_a_step_are_those_of_its_samples(size, first, count, shuffle, seed):
    order = GlobalOrder(size, seed, shuffle)
    numbers = np.arange(first, first + count)
    assert order.rows(numbers).tolist() == [order.row(number) for number in numbers.tolist()]


def test_rows_of_a_large_order_are_those_of_its_samples():
    order = GlobalOrder(10**12, seed=7)
    numbers = np.array([123456789, 10**12 - 1, 10**12, 5 * 10**12 + 3])
    assert order.rows(numbers).tolist() == [order.row(int(number)) for number in numbers]


def odd_samples(folder):
    """Images of several sizes and numbers, and every kind of sample that is bad by the index."""
    members = []
    for n in range(40):
        sizes = [(10 + 7 * (n % 5), 8 + n % 3)] * (n % 4) + [(12, 30)] * (n % 7 == 0)
        members += [(f"{n:03d}.{at}.png", encode_image(*size, "PNG")) for at, size in enumerate(sizes)]
        if n % 11 == 0:
            members.append((f"{n:03d}.9.jpg", b"no image"))
        if n % 13 != 5:
            members.append((f"{n:03d}.json", chat("<image>" * len(sizes) + "q", "a" * (200 if n == 17 else 3))))
    write_tar(folder / "a-000000.tar", members[: len(members) // 2])
    write_tar(folder / "a-000001.tar", members[len(members) // 2 :])
    return folder


def refuses_wide(height, width):
    if width > 2 * height:
        raise ValueError("too wide")
    return height * width // 16


MEDIA = [
    Media("images", "image", "<image>", refuses_wide, lambda height, width: (height, width)),
    Media(
        "tiles",
        "image",
        "<image:tiles>",
        lambda height, width: 2 + (height > 0),
        lambda height, width: (8, 8),
        inner_tokens=lambda height, width: 5 + height,
        pairs=lambda height, width: 7 * (1 + width),
        pair_cost=0.25,
        cut_several=False,
    ),
    Media("audio", "audio", "<audio>", lambda frames, rate: frames // rate, lambda frames, rate: (frames, rate)),
]


@pytest.mark.parametrize("fields", [NO_FIELDS, read_fields({"conversations": "json", "image": ["1.png", "0.png"]})])
def test_the_arrays_of_a_step_are_those_of_its_samples(tmp_path, fields):
    tokenizer = build_tokenizer("bytes", [media.placeholder for media in MEDIA])
    options = {"media": MEDIA, "seed": 5, "fields": fields}
    data = ShardDataset(odd_samples(tmp_path), tokenizer=tokenizer, sequence_length=70, **options)
    found = data.plan_step(33, 90)
    bad = 0
    for place, number in enumerate(range(33, 123)):
        meta = data.meta(number)
        for media in MEDIA:
            extents, tokens = meta.extents(media), meta.tokens[media.module]
            assert tokens == [media.sequence_tokens(*extent) for extent in extents]
            loads = [media.inner_tokens(*extent) for extent in extents] if media.inner_tokens else tokens
            pairs = [media.pairs(*extent) for extent in extents] if media.pairs else [load**2 for load in loads]
            arrays = [of[media.module][place] for of in (found.tokens, found.loads, found.pairs)]
            assert arrays == [sum(tokens), sum(loads), sum(pairs)], (number, media.module)
            items = found.media[media.module]
            of_sample = items[items.places == place]
            work = [load + round(media.pair_cost * of_item) for load, of_item in zip(loads, pairs, strict=True)]
            columns = [of_sample.numbers, of_sample.tokens, of_sample.loads, of_sample.work]
            expected = [list(range(len(tokens))), tokens, loads, work]
            assert [column.tolist() for column in columns] == expected, (number, media.module)
        bad += meta.bad_reason is not None
    assert 10 < bad < 80 and len({tuple(row) for row in np.stack([*found.pairs.values()], 1).tolist()}) > 5
    assert found.lengths is None


def test_equal_hashes_of_unequal_rows_are_told_apart(tmp_path, monkeypatch):
    """Every number mixed with 0 is 0: all rows have one hash."""
    monkeypatch.setattr("data.samples.sample_meta._MIX", np.uint64(0))
    tables = []
    catalogue = open_catalogue(sorted(odd_samples(tmp_path).glob("*.tar")))
    rows = catalogue.rows(np.repeat([0, 1], catalogue.counts), np.concatenate([*map(np.arange, catalogue.counts)]))
    for _ in range(2):
        tables.append(SampleTable(MEDIA, 70, Bounds()).step(rows))
        monkeypatch.undo()
    assert all((tables[0].pairs[module] == tables[1].pairs[module]).all() for module in tables[0].pairs)
    assert len(set(tables[0].pairs["images"].tolist())) > 3


LENGTHS = st.lists(st.integers(0, 100), min_size=48, max_size=48).map(np.array)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3]), st.sampled_from([8, 12]), st.booleans())
def test_microbatches_hold_similar_lengths_and_every_sample_once(lengths, replicas, unit, equal):
    plan = plan_by_length(7, lengths, 12, replicas, 100, Padding(unit, equal))
    shares = [share for of_ranks in plan.shares for share in of_ranks]
    assert sorted(place for share in shares for place in share.places.tolist()) == list(range(48))
    for share in shares:
        own = lengths[share.places]
        assert len(own) == 12 // replicas and own.max() <= share.length <= 100
        assert share.length % unit == 0 or share.length == 100
        assert equal or share.length - own.max() < unit or share.length == unit
    assert not equal or len({share.length for share in shares}) == 1
    # Which samples make a microbatch does not depend on the replicas.
    alone = plan_by_length(7, lengths, 12, 1, 100, Padding(unit))
    for at in range(4):
        assert sorted(plan.places[at]) == sorted(alone.places[at])
    positions, replica_of = plan.positions_and_replicas
    assert positions[np.concatenate(plan.places)].tolist() == list(range(48))
    assert all((replica_of[share.places] == at % replicas).all() for at, share in enumerate(shares))
    tops = [max(lengths[plan.places[at]]) for at in range(4)]
    assert tops == sorted(tops, reverse=True) and plan.tokens == lengths.sum() <= plan.positions


def test_replicas_get_as_many_positions():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 0.9, 256).astype(int) + 1, 2048)
    plan = plan_by_length(0, lengths, 16, 4, 2048, Padding())
    load = [sum(of_ranks[rank].length for of_ranks in plan.shares) for rank in range(4)]
    assert max(load) < 1.06 * np.mean(load)
    in_order = plan_in_order(0, 256, 16, 4, 2048)
    assert plan.positions < in_order.positions / 4 and plan.tokens / plan.positions > 0.8


def test_equal_lengths_leave_samples_in_their_order():
    plan, in_order = plan_by_length(0, np.full(24, 40), 6, 2, 40, Padding()), plan_in_order(0, 24, 6, 2, 40)
    for at in range(4):
        assert plan.places[at].tolist() == in_order.places[at].tolist()
    assert plan.texts_of_length == in_order.texts_of_length == {40: 24}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_of_bad_samples_has_rows_of_a_unit(replicas):
    plan = plan_by_length(0, np.zeros(8, dtype=int), 4, replicas, 64, Padding(8))
    assert plan.texts_of_length == {8: 8} and plan.tokens == 0
