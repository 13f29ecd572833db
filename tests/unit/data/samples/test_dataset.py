"""Samples of shards: text, media and counts agree, and a bad sample keeps the shapes and has no loss."""

import base64
import io
import json
import logging
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from data.errors import DataError, ShardError, TooManyBadSamples
from data.media.options import Resize
from data.samples.media_spec import Media
from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from mimo_train.evaluation.predictions import shown_media
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images, media_of, prompt_and_truth, text_of


def counts_of(data):
    return [data.token_counts(number)["images"] for number in range(len(data))]


def test_text_media_and_counts_of_one_sample_agree(dataset):
    data = dataset(shuffle=False)
    assert len(data) == 13
    assert counts_of(data) == [4, 4, 0, 4, 8, 0, 4, 4, 0, 4, 4, 0, 4]
    placeholder = data.tokenizer.placeholder_id("<image>")
    for number in range(26):
        n = number % 13
        text, drawn_images = text_of(data, number), media_of(data, number, "images")
        assert data.locate(number)[1] == f"{n:04d}" and text.number == number
        assert (text.input_ids == placeholder).sum() == data.token_counts(number)["images"] == 4 * len(drawn_images)
        assert [image.float().mean().item() for image in drawn_images] == [
            10 * n + at for at in range(len(drawn_images))
        ]
        assert all(image.dtype == torch.uint8 and tuple(image.shape) == (3, 16, 16) for image in drawn_images)
        assert prompt_and_truth(data, number) == (f"q{n}", f"a{n}")
        assert data.tokenizer.decode(text.labels[text.loss_mask == 1]) == f"a{n}"
    assert data.bad_samples.count == 0


def test_reading_text_never_reads_pixels_and_counts_read_nothing(dataset):
    data = dataset()
    for number in range(13):
        data.token_counts(number)
        data.locate(number)
    assert not data.reader.bytes_read
    for number in range(13):
        text_of(data, number)
    assert set(data.reader.bytes_read) == {"json"}
    other = dataset()
    for number in range(13):
        media_of(other, number, "images")
    assert set(other.reader.bytes_read) == {"0.png", "1.png"}


def test_sizes_from_the_index_reach_the_module(dataset):
    seen = []

    def size(height, width):
        seen.append((height, width))
        return height // 2, width

    module = Media("images", "image", "<image>", lambda height, width: height // 10, size)
    data = dataset(media=(module,), shuffle=False)
    seen.clear()  # of all samples, once
    assert [tuple(item.shape) for item in media_of(data, 4, "images")] == [(3, 12, 16), (3, 12, 16)]
    assert set(seen) == {(24, 16)} and data.token_counts(4) == {"images": 4}


def test_two_modules_take_each_image(dataset):
    modules = (images(), images(side=8, tokens=2, module="dino", placeholder="<dino>"))
    data = dataset(media=modules, shuffle=False)
    assert data.token_counts(4) == {"images": 8, "dino": 4}
    ids = text_of(data, 4).input_ids
    first, second = (data.tokenizer.placeholder_id(name) for name in ("<image>", "<dino>"))
    assert [token for token in ids if token in (first, second)] == ([first] * 4 + [second] * 2) * 2
    assert media_of(data, 4, "dino")[0].shape == (3, 8, 8) and media_of(data, 4, "images")[0].shape == (3, 16, 16)


def test_audio_module(tmp_path):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.full(4000, 8192, dtype=np.int16), 8000, format="WAV")
    shard = write_tar(tmp_path / "s.tar", [("a.wav", buffer.getvalue()), ("a.json", chat("<audio>what?", "hum"))])
    module = Media(
        "audio", "audio", "<audio>", lambda samples, rate: samples // 1000, lambda samples, rate: (5000, 8000)
    )
    tokenizer = build_tokenizer("bytes", ["<audio>"])
    data = ShardDataset(shard, tokenizer=tokenizer, sequence_length=32, media=[module])
    (clip,) = media_of(data, 0, "audio")
    assert clip.dtype == torch.float32 and clip.shape == (5000,)
    assert (clip[:4000] == 0.25).all() and not clip[4000:].any()
    assert data.token_counts(0) == {"audio": 4} and text_of(data, 0).length > 4 and 0 not in data.bad_samples


def test_blind_gives_zeros_and_reads_no_pixels(dataset):
    data = dataset(blind=True, shuffle=False)
    drawn_images = media_of(data, 4, "images")
    assert [tuple(item.shape) for item in drawn_images] == [(3, 16, 16)] * 2
    assert not any(item.any() for item in drawn_images) and not data.reader.bytes_read
    seeing = dataset(shuffle=False)
    assert (text_of(data, 4).input_ids == text_of(seeing, 4).input_ids).all() and counts_of(data) == counts_of(seeing)


def test_shuffle_follows_seed_and_epoch(dataset):
    def keys(data, epoch):
        return [data.locate(number)[1] for number in range(13 * epoch, 13 * epoch + 13)]

    data = dataset(seed=1)
    assert keys(data, 0) == keys(dataset(seed=1), 0) != keys(data, 1)
    assert keys(data, 0) != keys(dataset(seed=2), 0)
    assert sorted(keys(data, 5)) == [f"{n:04d}" for n in range(13)]


def test_fingerprint_follows_the_content_not_the_place(dataset, small, tmp_path):
    first = dataset().fingerprint
    moved = tmp_path / "moved"
    shutil.copytree(small, moved)
    assert dataset(shards=moved).fingerprint == first
    assert dataset(shards=f"{small}/a-000000.tar").fingerprint != first
    write_tar(moved / "a-000001.tar", [("k.txt", b"x")])
    assert dataset(shards=moved).fingerprint != first


def test_more_shards_than_open_indexes(tmp_path, monkeypatch):
    monkeypatch.setattr("data.samples.shard_dataset._OPEN_INDEXES", 2)
    for n in range(5):
        write_tar(tmp_path / f"{n}.tar", [(f"{n}{at}.txt", b"x") for at in range(n)])  # the first shard is empty
    data = ShardDataset(tmp_path, tokenizer=build_tokenizer("bytes"), sequence_length=8, shuffle=False)
    assert [data.locate(number)[1] for number in range(10)] == [f"{n}{at}" for n in range(5) for at in range(n)]
    write_tar(tmp_path / "1.tar", [("other.txt", b"xyz")])
    with pytest.raises(ShardError, match="changed"):
        [text_of(data, number) for number in (0, 3, 9, 0)]


def test_no_sample_at_all(tmp_path):
    write_tar(tmp_path / "empty.tar", [])
    with pytest.raises(DataError, match=r"data\.shards.*no sample"):
        ShardDataset(tmp_path, tokenizer=build_tokenizer("bytes"), sequence_length=8)


# Bad samples


def damaged_shard(folder):
    """Samples a to h; all but `a` are bad, each in its own way."""
    good = encode_image(20, 20, seed=1)
    huge = b"".join([b"<image>"] * 7)
    members = [("a.jpg", good), ("a.json", chat("<image>q", "a"))]
    members += [("b.jpg", good[: len(good) * 3 // 4]), ("b.json", chat("<image>q", "b"))]  # header whole, pixels cut
    members += [("c.jpg", good), ("c.json", b'{"conversations": [')]
    members += [("d.jpg", good), ("d.json", chat("<image><image>q", "d"))]
    members += [("e.jpg", good)]
    members += [("f.jpg", b"no image at all"), ("f.json", chat("<image>q", "f"))]
    members += [(f"g.{n}.jpg", good) for n in range(7)] + [("g.json", chat(huge.decode(), "g"))]
    members += [("h.jpg", encode_image(20, 3)), ("h.json", chat("<image>q", "h"))]
    return write_tar(folder / "bad-000000.tar", members)


def picky(**options):
    def num_tokens(height, width):
        if width < 4:
            raise ValueError(f"width {width} is less than one patch (4)")
        return 4

    return Media("images", "image", "<image>", num_tokens, lambda height, width: (16, 16), **options)


# key -> (found by whom, tokens that the stand-in keeps, words of the reason)
FOUND = {
    "b": ("media", 4, "cannot decode"),
    "c": ("text", 4, "not JSON"),
    "d": ("text", 4, "2 image placeholder.*1 image member"),
    "e": ("both", 0, "no .json"),
    "f": ("both", 0, "no readable image header"),
    "g": ("both", 0, "28 tokens.*data.sequence_length is 24"),
    "h": ("both", 0, "less than one patch"),
}


@pytest.fixture
def damaged(tmp_path, dataset):
    shard = damaged_shard(tmp_path)
    return lambda **options: dataset(shards=shard, media=(picky(),), shuffle=False, **options)


@pytest.mark.parametrize("number", range(1, 8))
def test_stand_ins_keep_the_shapes_and_carry_no_loss(damaged, number, caplog):
    key = "abcdefgh"[number]
    found_by, tokens, reason = FOUND[key]
    data = damaged(max_bad_samples=1)
    assert data.token_counts(number) == {"images": tokens} and number not in data.bad_samples
    with caplog.at_level(logging.WARNING):
        text = text_of(data, number)
        assert (number in data.bad_samples) == (found_by != "media")
        drawn_images = media_of(data, number, "images")
        media_of(data, number, "images")
        text_of(data, number)
    assert number in data.bad_samples and data.bad_samples.count == 1
    assert (text.input_ids == data.tokenizer.placeholder_id("<image>")).sum() == tokens
    assert [tuple(image.shape) for image in drawn_images] == [(3, 16, 16)] * (tokens // 4)
    if found_by != "media":
        assert not text.loss_mask.any()
    if found_by != "text":
        assert not any(image.any() for image in drawn_images)
    (record,) = caplog.records
    assert "bad-000000.tar" in record.message and f"key {key!r}" in record.message and re.search(reason, record.message)


def test_pixels_that_are_not_rounded_are_float32_in_stand_ins_and_reports_too(dataset, tmp_path):
    modules = [picky(), picky(resize=Resize("bilinear", rounded=False))]
    shard = damaged_shard(tmp_path)
    data = [dataset(shards=shard, media=(one,), max_bad_samples=1, shuffle=False) for one in modules]
    (whole,), (exact,) = (media_of(one, 0, "images") for one in data)
    assert exact.dtype == torch.float32 and whole.dtype == torch.uint8 and 0 < (exact - exact.round()).abs().max()
    (blank,) = media_of(data[1], 1, "images")
    assert blank.dtype == torch.float32 and not blank.any()
    shown = Image.open(io.BytesIO(base64.b64decode(shown_media(data[1], 0)["images"][0])))
    assert np.array_equal(np.asarray(shown), exact.round().to(torch.uint8).permute(1, 2, 0).numpy())
    two_frames = {"images": [torch.cat([exact, blank])]}
    assert shown_media(data[1], 0, two_frames)["images"] == shown_media(data[1], 0)["images"]


def test_the_first_bad_sample_ends_a_run_without_a_budget(damaged):
    data = damaged()
    text_of(data, 0)
    said = r"data\.max_bad_samples: 1 bad sample, 0 allowed.*bad-000000\.tar, key 'c'.*not JSON.*verify"
    with pytest.raises(TooManyBadSamples, match=said):
        text_of(data, 2)


@pytest.mark.parametrize("allowed", [2, 0.25])
def test_the_budget_counts_each_sample_once_in_all_epochs(damaged, allowed):
    data = damaged(max_bad_samples=allowed)
    assert len(data) == 8 and data.allowed_bad_samples == 2
    for epoch in range(3):
        text_of(data, 2 + epoch * len(data))
    media_of(data, 1, "images")
    assert data.bad_samples.count == 2 and [bad.key for bad in data.bad_samples.take()] == ["c", "b"]
    assert [number for number in range(2 * len(data)) if number in data.bad_samples] == [1, 2, 9, 10]
    with pytest.raises(TooManyBadSamples, match="3 bad samples, 2 allowed"):
        text_of(data, 3)
    assert not data.bad_samples.take()  # on its way to the file


def test_image_records_without_a_image_module_say_so(small):
    data = ShardDataset(small, tokenizer=build_tokenizer("bytes"), sequence_length=24, shuffle=False)
    with pytest.raises(TooManyBadSamples, match="1 image.*no module of this run"):
        text_of(data, 0)
    assert data.token_counts(0) == {}


def test_unknown_media_kind():
    with pytest.raises(DataError, match=r"modules\.x.*'video'"):
        Media("x", "video", "<video>", int, int)


def test_several_answers_are_bad_where_a_prefix_sees_itself(dataset, tmp_path):
    def record(name, *losses):
        turns = [("human", "q", {}), ("gpt", "first", {"loss": losses[0]}), ("human", "r", {}), ("gpt", "second", {})]
        said = [{"from": role, "value": text, **more} for role, text, more in turns]
        return f"{name}.json", json.dumps({"conversations": said}).encode()

    shard = write_tar(tmp_path / "turns-000000.tar", [record("a", True), record("b", False)])
    data = dataset(
        shards=shard, media=(replace(images(), bidirectional="prefix"),), sequence_length=64, shuffle=False,
        max_bad_samples=1,
    )  # fmt: skip
    assert data.read_text(0)[1].reason.startswith("has several answers, and all tokens before an answer see each other")
    sample, bad = data.read_text(1)
    first = np.flatnonzero(sample.loss_mask)[0]
    assert bad is None and data.tokenizer.decode(sample.labels[sample.loss_mask == 1]) == "second"
    assert (sample.blocks == np.where(np.arange(64) <= first, 0, -1)).all()
