"""Shards read from beginning to end: the samples of an index, exact after any cut; what is damaged says where."""

import bz2
import gzip
import io
import random
import tarfile

import numpy as np
import pytest
import webdataset

from data.bounds import Bounds
from data.errors import DataError, ShardError
from data.fields import read_fields
from data.pipeline import Batching, Reader, StepLoader
from data.storage.command import Command
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_picture
from tests.unit.data.streaming import one_shard, stream

BATCH = 4


def trained(dataset, steps, *, consumed=0, dp=1, workers=1):
    """Keys of every sample of some steps, in the order of the batch, as each data-parallel rank has read them."""
    keys = {}
    for rank in range(dp):
        readers = [Reader("language", rank, dp), Reader("images", rank, dp)]
        batching = Batching(BATCH, 2, replicas=dp)
        with StepLoader(
            dataset(), batching, readers, consumed_samples=consumed, workers=workers, limit=steps
        ) as loader:
            for step in loader:
                for microbatch, numbers in zip(step.microbatches, step.numbers, strict=True):
                    assert numbers["language"] == numbers["images"]
                    texts = microbatch["input_ids"].tolist()
                    pictures = microbatch["modality_inputs"]["images"]
                    means = [] if pictures is None else pictures["images"]["pixels"].double().mean((1, 2, 3)).tolist()
                    for number, text in zip(numbers["language"], texts, strict=True):
                        keys[number] = (loader.dataset.locate(number), tuple(text), tuple(means))
                        # Of a microbatch with one sample the pictures are its own.
                        assert len(texts) > 1 or dp == 2
            loader.dataset.close()
    return [keys[number][:2] for number in sorted(keys)]


def test_a_stream_has_the_samples_of_an_index(small, squeezed, dataset):
    def steps(data):
        readers = [Reader("language", 0, 1), Reader("images", 0, 1)]
        with StepLoader(data, Batching(BATCH, 2), readers, limit=8) as loader:
            yield from loader
        data.close()

    indexed = dataset(small, shuffle=False)
    assert indexed.is_at_hand and not stream(squeezed, shuffle=False).is_at_hand
    for places in (squeezed, f"pipe:cat '{small}'/a-00000{{0..1}}.tar"):
        for one, other in zip(steps(indexed), steps(stream(places, shuffle=False)), strict=True):
            assert (one.token_counts, one.loads, one.pairs) == (other.token_counts, other.loads, other.pairs)
            for own, streamed in zip(one.microbatches, other.microbatches, strict=True):
                for name in ("input_ids", "labels", "loss_mask", "position_ids", "sample_numbers"):
                    assert own[name].equal(streamed[name]), name
                pictures, read = own["modality_inputs"]["images"], streamed["modality_inputs"]["images"]
                assert (pictures is None) == (read is None)
                assert pictures is None or pictures["images"]["pixels"].equal(read["images"]["pixels"])


def test_samples_are_those_of_webdataset(squeezed):
    paths = sorted(squeezed.iterdir())
    theirs = [sample["__key__"] for path in paths for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert [key for path in paths for key in one_shard(path)] == theirs and len(theirs) == 13


@pytest.mark.parametrize("dp", [1, 2])
def test_any_cut_gives_the_sequence_of_a_run_that_was_not_interrupted(squeezed, dp):
    """13 samples in epochs whose shards are in other orders; 12 steps are almost four epochs."""

    def opened():
        return stream(squeezed, seed=7)

    whole = trained(opened, 12)
    rng = random.Random(3)
    for _ in range(4):
        cuts = sorted(rng.sample(range(1, 12), 2))
        parts = []
        for first, last in zip([0, *cuts], [*cuts, 12], strict=True):
            parts += trained(opened, last - first, consumed=first * BATCH, dp=dp, workers=rng.choice([0, 2]))
        assert parts == whole, cuts
    keys = [key for (_, key), _ in whole]
    for epoch in range(3):
        assert len(set(keys[13 * epoch : 13 * epoch + 13])) == 13, "each sample once an epoch"
    orders = {tuple(dict.fromkeys(shard for (shard, _), _ in whole[13 * at : 13 * at + 13])) for at in range(3)}
    assert len(orders) == 2, "shards are in another order in some epoch"


def test_shards_that_were_counted_are_passed_over_unread(squeezed):
    data = stream(squeezed, shuffle=False)
    data.plan_step(0, 20)  # all shards once
    opened, original = [], data._open
    data._open = lambda shard, skip: opened.append((shard, skip)) or original(shard, skip)
    data.plan_step(13 * 1000 + 7, 2)
    assert opened[0] == (1, 1) and data.locate(13 * 1000 + 7)[1] == "0007"
    data.close()


def test_members_that_a_rank_does_not_read_are_not_held(squeezed):
    data = stream(squeezed, shuffle=False)
    with StepLoader(data, Batching(BATCH, 4), [Reader("language", 0, 1)], limit=1, workers=0) as loader:
        next(loader)
        held = [data._held[number].contents for number in range(4)]
    assert [len(contents) for contents in held] == [1, 1, 1, 1]
    with pytest.raises(KeyError):
        data.read_media(0, "images")[0]
    data.close()


def test_a_window_of_steps_is_held(squeezed):
    data = stream(squeezed)
    for step in range(40):
        data.plan_step(step * BATCH, BATCH)
        assert len(data._held) <= 8 * BATCH
    assert data.is_bad(3) is False
    with pytest.raises(AssertionError, match="none of the steps that were planned last"):
        data.outline(0)
    assert data.locate(0)[1].startswith("sample ")
    data.close()


def test_bad_samples_are_counted_once_in_all_epochs(tmp_path):
    members = [(f"{n}.json", chat("q", f"a{n}") if n != 2 else b"{") for n in range(5)]
    members[4:] = [("4.png", encode_picture(8, 8, "PNG")[:60]), ("4.json", chat("<image>", "a"))]
    write_tar(tmp_path / "a.tar", members)
    data = stream(tmp_path)
    readers = [Reader("language", 0, 1), Reader("images", 0, 1)]
    with StepLoader(data, Batching(5, 5), readers, limit=3, workers=0) as loader:
        for step in loader:
            assert step.bad.sum() == 2
    found = data.bad_samples.take()
    assert (
        sorted(bad.key for bad in found) == ["2", "4"] and "is not JSON" in min(found, key=lambda one: one.key).reason
    )
    data.close()


def test_fields_and_identities(tmp_path):
    picture = encode_picture(8, 8, "PNG", value=1)
    other = encode_picture(8, 8, "PNG", value=2)
    members = [
        ("a.png", picture),
        ("a.cls", b"7"),
        ("b.png", other),
        ("b.cls", b"8"),
        ("c.png", picture),
        ("c.cls", b"7"),
    ]
    write_tar(tmp_path / "a.tar", members)
    data = stream(tmp_path, fields=read_fields({"label": "cls"}), shuffle=False)
    data.plan_step(0, 3)
    assert data.prompt_and_truth(1)[1] == "8"
    one, two, three = map(data.identity, range(3))
    assert one == three != two, "of what is read, wherever it stands"
    data.close()


def test_a_sample_above_its_bound_is_bad_and_not_held(tmp_path):
    """A member of 64 MB of zeros is 64 kB compressed."""
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, raw in (("a.json", chat("q", "a")), ("b.png", bytes(64 << 20)), ("b.json", chat("<image>", "a"))):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    data = stream(tmp_path, bounds=Bounds(sample_bytes=1 << 20), shuffle=False)
    data.plan_step(0, 2)
    assert sum(len(content) for held in data._held.values() for content in held.contents.values()) < 1000
    assert data.read_text(0)[1] is None
    assert "above data.bounds.sample_bytes 1048576" in data.read_text(1)[1].reason
    data.close()


def test_endless_zeros_and_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data.storage.tar._LONGEST_END", 1 << 20)
    with pytest.raises(ShardError, match=r"pipe:cat /dev/zero: 1048576 zero bytes behind its last member, at byte 0"):
        one_shard(Command("cat /dev/zero"))
    monkeypatch.setattr("data.streams.shard._MOST_MEMBERS", 3)
    write_tar(tmp_path / "a.tar", [(f"a.{at}.txt", b"x") for at in range(5)])
    with pytest.raises(ShardError, match="the key 'a' has more than 3 members"):
        one_shard(tmp_path / "a.tar")


def cases(raw):
    """(damaged shard, what is said, how many samples come before)."""
    squeezed = gzip.compress(raw)
    flipped = bytearray(squeezed)
    flipped[-6] ^= 1  # of the checksum
    yield squeezed[: len(squeezed) // 2], "the compressed data end too early"
    yield bytes(flipped), "the compressed data are damaged .*CRC check failed"
    yield gzip.compress(raw[:700]), "truncated at 700 bytes"
    yield gzip.compress(raw[:1024]), r"truncated at 1024 bytes: a tar ends in 1024 zero bytes, this one in 0"
    yield gzip.compress(raw[:1024] + b"\1" * 512 + raw[1536:]), "damaged header at byte 1024"
    yield gzip.compress(b"no tar" * 200), "not a readable uncompressed tar"
    yield gzip.compress(b""), "the file is empty"
    yield bz2.compress(raw), "is compressed by bzip2, and gzip and zstd are read"


def test_damage_is_an_error_with_shard_and_sample(tmp_path):
    write_tar(tmp_path / "whole.tar", [(f"{n}.txt", np.random.default_rng(n).bytes(400)) for n in range(20)])
    for raw, said in cases((tmp_path / "whole.tar").read_bytes()):
        path = tmp_path / "a.tar.gz"
        path.write_bytes(raw)
        with pytest.raises(DataError, match=rf"a\.tar\.gz: (.|\n)*{said}"):
            one_shard(path)
    path.write_bytes(gzip.compress((tmp_path / "whole.tar").read_bytes())[:5000])
    data = stream(path, media=(), sequence_length=8)
    with pytest.raises(ShardError, match=r"end too early.*\(in sample \d+ of the shard, counted from 0\)"):
        data.plan_step(0, 20)
    data.close()


def test_a_look_back_reads_again_what_was_dropped_and_holds_no_more_than_before(squeezed):
    data = stream(squeezed)
    for step in (*range(10), 5, *range(6, 30)):
        data.plan_step(2 * step, 2)
        own = [data.read_text(number)[0].input_ids.tolist() for number in (2 * step, 2 * step + 1)]
        data.will_read([{"language": [2 * step]}])
        assert len(own) == 2 and len(data._held) <= 16, step
    data.close()


def test_an_epoch_ends_with_its_last_shard_in_any_order(squeezed):
    for seed in range(6):
        data = stream(squeezed, seed=seed)
        assert sum(map(len, data.first_epoch())) == 13
        assert (data.epoch_end(14), data.epoch_end(13), data.epoch_end(5)) == (13, 13, 5)
        data.close()


def test_a_shard_that_is_another_one_is_an_error(small, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes((small / "a-000000.tar").read_bytes())
    data = stream(path)
    data.plan_step(0, 6)
    data.close()
    (tmp_path / "new").write_bytes((small / "a-000001.tar").read_bytes())
    (tmp_path / "new").rename(path)
    with pytest.raises(ShardError, match="is not the file that it was when the run started"):
        data.plan_step(6, 6)
    data.close()
    count = tmp_path / "count"  # of a command only the names and sizes of members show it
    command = (
        f"n=$(cat {count} 2>/dev/null || echo 5); echo 7 > {count}; printf $n > m.txt; tar c --transform s/^/$n/ m.txt"
    )
    data = stream(f"pipe:cd {tmp_path}; {command}", media=(), sequence_length=8)
    with pytest.raises(
        ShardError, match="has 1 sample, and had as many, of other names or sizes, when it was read before"
    ):
        data.plan_step(0, 3)
    data.close()


def test_ranks_that_read_other_samples_have_other_digests(small, squeezed):
    def digests(shards):
        data = stream(shards, shuffle=False)
        found = [data.plan_step(4 * step, 4).digest for step in range(5)]
        data.close()
        return found

    whole = digests(squeezed)
    assert whole == digests(small) and len(set(whole)) == 5
    one_less = digests(f"{small}/a-000000.tar")
    assert one_less[0] == whole[0] and not set(one_less[1:]) & set(whole)


def test_another_number_of_samples_the_second_time_is_an_error(small, tmp_path):
    count = tmp_path / "count"
    command = f"n=$(cat {count} 2>/dev/null || echo 0); echo 1 > {count}; cat '{small}/a-00000'$n.tar"
    data = stream(f"pipe:{command}")
    with pytest.raises(ShardError, match="has 7 samples, and had 6 when it was read before"):
        for step in range(20):
            data.plan_step(step, 1)
    data.close()
