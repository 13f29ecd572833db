"""Text lengths are those of the texts, counted once, and never taken for those of others."""

import logging
import pickle

import pytest

from data.errors import DataError, RecordError
from data.index.index_file import load_file
from data.loader import StepLoader
from data.order.step import Batching, Reader
from data.order.step_plan import Padding
from data.records.members import NO_FIELDS
from data.samples.shard_dataset import ShardDataset
from data.samples.text_lengths import TextLengths, _count_shard
from mimo_train.config.compose import load
from mimo_train.inputs.datasets import OneShard
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images, text_of


@pytest.fixture
def shards(tmp_path):
    """Two shards of six samples: texts of 1 to 45 letters, two with an image, one whose record cannot be read."""
    members = []
    for n in range(12):
        image = [(f"{n:02d}.png", encode_image(16, 16, "PNG"))] if n in (2, 9) else []
        text = b"{" if n == 5 else chat("<image>" * len(image) + "q", "a" * (1 + 4 * n))
        members.append([*image, (f"{n:02d}.json", text)])
    folder = tmp_path / "shards"
    folder.mkdir()
    for at in range(2):
        write_tar(folder / f"s-{at}.tar", [entry for part in members[6 * at : 6 * at + 6] for entry in part])
    return folder


def counted(data):
    """How many texts had to be counted."""
    lengths = TextLengths(data)
    number = sum(done.samples for done in lengths.build())
    lengths.serve()
    return number


def test_lengths_are_those_of_the_texts_and_of_stand_ins(shards, dataset):
    data = dataset(shards=shards, sequence_length=40, max_bad_samples=1)
    assert counted(data) == 12
    numbers = {data.order.row(number): number for number in range(12)}
    assert data.lengths.tolist() == [text_of(data, numbers[row]).length for row in range(12)]
    assert data.lengths[5] == 0 and data.lengths[2] == 4 + 6 + 9 and set(data.lengths[10:]) == {40}
    assert data.plan_step(7, 10).lengths.tolist() == [data.lengths[data.order.row(n)] for n in range(7, 17)]


def test_texts_are_read_once_and_not_by_ranks_that_need_none(shards, dataset):
    assert counted(dataset(shards=shards)) == 12
    data = dataset(shards=shards)
    assert counted(data) == 0 and not data.reader.bytes_read
    batching = Batching(4, 2, None, 1, Padding(4))
    with StepLoader(data, batching, [Reader("images", 0, 1)], workers=0, limit=3) as loader:
        steps = list(loader)
    assert set(data.reader.bytes_read) == {"png"} and steps[0].plan.lengths is not None


def test_what_lengths_follow_from_counts_again_apart(shards, dataset):
    first = dataset(shards=shards)
    counted(first)
    for other in (
        dataset(shards=shards, sequence_length=23),
        dataset(shards=shards, media=(images(tokens=5),)),
        dataset(shards=shards, media=()),
    ):
        assert 6 <= counted(other) <= 12
    again = dataset(shards=shards)
    assert counted(again) == 0 and again.lengths.tolist() == first.lengths.tolist()
    for part in (dataset(shards=shards, sequence_length=23), dataset(shards=shards, media=())):
        assert counted(part) == 0 and part.lengths.tolist() != first.lengths.tolist()


def test_one_changed_shard_is_counted_alone(shards, dataset):
    counted(dataset(shards=shards))
    write_tar(shards / "s-1.tar", [("x.json", chat("q", "longer than any other answer in it"))])
    data = dataset(shards=shards)
    assert counted(data) == 1 and len(data.lengths) == 7


def test_a_damaged_file_is_counted_again(shards, dataset, caplog):
    counted(dataset(shards=shards))
    (file,) = shards.glob("*.mimo-lengths")
    whole = file.read_bytes()
    for at, again in ((len(whole) - 1, 6), (260, 12), (20, 12), (None, 12)):  # lengths of a shard, names, head
        content = bytearray(whole)
        if at is None:
            del content[-3:]
        else:
            content[at] ^= 1
        file.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert counted(dataset(shards=shards)) == again, at
        assert "made again" in caplog.text and file.read_bytes() == whole
        caplog.clear()


def test_a_count_that_is_killed_goes_on_where_it_was(shards, dataset, monkeypatch):
    lengths = TextLengths(dataset(shards=shards))
    work = lengths.build()
    assert next(work).samples == 6
    work.close()  # as an end leaves it, and a kill after a save
    data, read = dataset(shards=shards), []
    monkeypatch.setattr(
        data, "lengths_of", lambda shard, row: read.append(shard) or ShardDataset.lengths_of(data, shard, row)
    )
    done = list(TextLengths(data).build())
    assert [(one.samples, one.here) for one in done] == [(6, True)], "the first was counted by the one before"
    assert counted(data) == 0 and read == [1] * 6 and not list(shards.glob("*.lock"))
    fresh = dataset(shards=shards, cache_dir=shards.parent / "apart")
    assert counted(fresh) == 12 and fresh.lengths.tolist() == data.lengths.tolist()


def test_one_that_finds_another_at_work_waits_for_what_it_counts(shards, dataset, monkeypatch):
    first, second = (TextLengths(dataset(shards=shards)) for _ in range(2))
    one, other = first.build(), second.build()
    assert next(one).samples == 6 and next(other).samples == 0 and next(other).samples == 0
    assert [done.samples for done in one] == [6]
    monkeypatch.delattr(ShardDataset, "lengths_of")
    found = list(other)
    assert sum(done.samples for done in found) == 12 and second.missing() == []
    assert not any(done.here for done in found), "the first has counted all of it"
    second.serve()


def test_a_count_of_other_shards_takes_what_a_killed_one_has(shards, dataset, monkeypatch):
    work = TextLengths(dataset(shards=shards)).build()
    assert next(work).shard == shards / "s-0.tar"
    work.close()  # as a kill leaves it
    assert counted(dataset(shards=shards / "s-1.tar")) == 6 and not list(shards.glob("*.lock"))
    monkeypatch.delattr(ShardDataset, "lengths_of")
    assert counted(dataset(shards=shards)) == 0


def test_files_of_some_shards_are_joined_and_forget_those_that_are_gone(shards, dataset):
    counted(dataset(shards=shards / "s-1.tar"))
    data = dataset(shards=shards)
    assert counted(data) == 6 and data.lengths.base is not None  # the file itself, mapped
    backwards = dataset(shards=[shards / "s-1.tar", shards / "s-0.tar"])
    assert counted(backwards) == 0 and backwards.lengths.tolist() == [*data.lengths[6:], *data.lengths[:6]]
    (path,) = shards.glob("*.mimo-lengths")
    (shards / "s-0.tar").rename(shards / "z.tar")
    assert counted(dataset(shards=shards)) == 6 and load_file(path, "lengths").names == ["s-1.tar", "z.tar"]


def test_the_folder_of_the_cache_is_used_and_named_where_it_cannot_be_written(shards, dataset, tmp_path):
    folder = tmp_path / "cache"
    assert counted(dataset(shards=shards, cache_dir=folder)) == 12
    assert len(list(folder.glob("*.mimo-lengths"))) == 1 and not list(shards.glob("*.mimo-lengths"))
    data = dataset(shards=shards, cache_dir=folder)
    data.cache_dir = __file__
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        counted(data)


def test_a_text_of_another_length_than_was_counted_ends_the_run(shards, dataset):
    data = dataset(shards=shards, shuffle=False)
    counted(data)
    data.lengths = data.lengths + 1
    with (
        pytest.raises(DataError, match=r"s-0\.tar, key '01': its text has 11 tokens, and had 12"),
        StepLoader(data, Batching(2, 2, None, 1, Padding(4)), [Reader("language", 0, 1)], workers=0) as loader,
    ):
        next(loader)


def test_a_sample_that_turns_bad_keeps_its_planned_length(shards, dataset, monkeypatch):
    data = dataset(shards=shards, shuffle=False, sequence_length=40, max_bad_samples=2)
    counted(data)
    encode = data.tokenizer.template.encode

    def fails(conversation, media):
        if conversation.turns[-1].text == "a" * 29:
            raise RecordError("no")
        return encode(conversation, media)

    monkeypatch.setattr(data.tokenizer.template, "encode", fails)
    readers = [Reader("language", 0, 1)]
    with StepLoader(data, Batching(12, 3, None, 1, Padding(4)), readers, workers=0) as loader:
        step = next(loader)
    assert step.bad.nonzero()[0].tolist() == [5, 7]
    for at, of_ranks in enumerate(step.plan.shares):
        batch, share = step.microbatches[at], of_ranks[0]
        assert batch["input_ids"].shape == batch["position_ids"].shape == (3, share.length)
        assert batch["sample_numbers"].tolist() == share.places.tolist()
        for row, place in enumerate(share.places.tolist()):
            text = data.read_text(place)[0]
            assert (batch["input_ids"][row].numpy() == text.input_ids[: share.length]).all()
            assert bool(batch["loss_mask"][row].any()) == (place not in (5, 7))
    lengths = [of_ranks[0].length for of_ranks in step.plan.shares]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 40 and lengths[-1] < 20


def test_other_processes_can_count_for_a_run(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    write_tar(folder / "a,b-{0}.tar", [(f"{n}.json", chat("q", "a" * n)) for n in range(1, 4)])
    cfg = load("gpt_tiny", (f"data.shards={folder}", "data.demo=", "data.validation_shards="))
    (shard,) = folder.glob("*.tar")
    version, lengths = _count_shard(pickle.dumps(OneShard(cfg)), shard, NO_FIELDS)
    data = OneShard(cfg)(shard)
    assert counted(data) == 3 and data.lengths.tobytes() == lengths and version == data.version(0)
