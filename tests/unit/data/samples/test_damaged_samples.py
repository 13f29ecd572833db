"""Samples that are too large, nested too deep, or make a decoder raise whatever it likes: bad samples, with shard, key,
number and bound; and what looks like one but is not."""

import errno
import io
import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
import torchaudio

from data.errors import DecodeError, MemoryShortage, ReadError, RecordError
from data.media.audio import decode_audio, resample_blocks
from data.media.audio_files import parse_audio_header
from data.media.decode import decode_image_file, fitted
from data.media.headers import parse_header_bytes
from data.media.options import BOUNDS, Bounds, Resize
from data.records.records import parse_record
from data.samples.bad_samples import BadSample
from data.samples.sample_meta import SampleTable
from data.storage import files as retry
from mimo_train.cli import main
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images, media_of, text_of

TIGHT = Bounds(pixels=400, seconds=1.0)


def clip(rate, seconds=0.5, kind="WAV"):
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(int(rate * seconds), dtype=np.int16), rate, format=kind)
    return buffer.getvalue()


def enlarged(raw: bytes) -> bytes:
    """A JPEG that claims 65,535 x 65,535 pixels."""
    at = next(at for at in range(2, len(raw)) if raw[at : at + 2] in (b"\xff\xc0", b"\xff\xc2"))
    return raw[: at + 5] + b"\xff\xff\xff\xff" + raw[at + 9 :]


def test_a_image_that_claims_to_be_huge_is_bad_by_the_index_and_by_the_decoder(dataset, tmp_path):
    bomb = enlarged(encode_image(20, 20))
    said = r"65535 x 65535 = 4294836225 pixels, above data\.bounds\.pixels 100000000"
    with pytest.raises(DecodeError, match=said):
        decode_image_file(bomb)
    folder = tmp_path / "shards"
    write_tar(folder / "s.tar", [("a.jpg", bomb), ("a.json", chat("<image>q", "a"))])
    data = dataset(folder, max_bad_samples=1)
    assert data.token_counts(0) == {"images": 0} and media_of(data, 0, "images") == []
    text_of(data, 0)
    assert data.bad_samples.latest.reason.startswith("member .jpg: 65535 x 65535 = ")


def test_a_strip_of_pixels_does_not_become_a_huge_image_on_its_way(dataset, tmp_path):
    square = Resize(tile=16)
    cut, tiled = replace(images(), resize=Resize(shortest_edge=16)), replace(images(), resize=square, cut_several=False)
    bounds, strip, raw = Bounds(pixels=2000), (1, 100), encode_image(1, 100, "PNG")
    resized = "16 x 1600 = 25600 pixels, above data.bounds.pixels 2000"
    around = "100 x 100 = 10000 pixels, above data.bounds.pixels 2000"
    with pytest.raises(DecodeError, match=resized):
        fitted(decode_image_file(raw), (16, 16), cut.resize, bounds=bounds)
    with pytest.raises(DecodeError, match=around):
        fitted(decode_image_file(raw), (16, 16), square, (0, 0), bounds)
    for number, (media, drawn_images, said) in enumerate([(cut, 1, resized), (tiled, 2, around)]):
        folder = tmp_path / str(number)
        members = [(f"a.{at}.png", raw) for at in range(drawn_images)]
        write_tar(folder / "s.tar", [*members, ("a.json", chat("<image>" * drawn_images, "a"))])
        data = dataset(folder, media=(media,), bounds=bounds, max_bad_samples=1)
        _, bad = data.read_text(0)
        assert bad.reason == f"member .0.png: {said}"
    assert tiled.excess(strip, strip, bounds) is None and images().excess(strip, strip, bounds) is None
    assert fitted(decode_image_file(raw), (16, 16), cut.resize, bounds=Bounds(pixels=25600)).shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("members", "records", "said"),
    [
        (
            [("0.png", encode_image(21, 20, "PNG"))],
            chat("<image>", "a"),
            "21 x 20 = 420 pixels, above data.bounds.pixels 400",
        ),
        ([("0.wav", clip(8000, 1.5))], chat("<audio>", "a"), "1.5 seconds, above data.bounds.seconds 1"),
    ],
)
def test_what_is_above_a_bound_is_bad_with_its_number(dataset, tmp_path, members, records, said):
    names = [(f"a.{at}.{name[2:]}", raw) for at, (name, raw) in enumerate(members)]
    write_tar(tmp_path / "s" / "s.tar", [*names, ("a.json", records)])
    audio = replace(images(module="audio", placeholder="<audio>"), kind="audio", size=lambda *_: (80, 8000))
    data = dataset(tmp_path / "s", media=(images(), audio), bounds=TIGHT, max_bad_samples=1)
    _, bad = data.read_text(0)
    assert said in bad.reason and "s.tar, key 'a'" in str(bad) and not bad.reason.startswith("key")


@pytest.mark.parametrize(("rate", "wanted"), [(44100, 16000), (8000, 16000), (48000, 16000), (16000, 44100)])
def test_a_long_clip_is_resampled_piece_by_piece(rate, wanted, monkeypatch):
    wave = torch.from_numpy(np.random.default_rng(0).normal(size=20_011).astype(np.float32))
    (whole,) = resample_blocks(iter([wave]), rate, wanted)
    assert torch.equal(whole, torchaudio.functional.resample(wave, rate, wanted))
    monkeypatch.setattr("data.media.audio._PIECE", 3000)
    for size in (20_011, 7000, 300):
        pieces = torch.cat([*resample_blocks(iter(wave.split(size)), rate, wanted)])
        assert pieces.shape == whole.shape and (pieces - whole).abs().max() < 1e-6


def test_rates_whose_filters_take_too_much_memory_are_rejected():
    with pytest.raises(DecodeError, match=r"cannot resample 44101 Hz to 16000 Hz.*Convert the audio to 16000 Hz"):
        [*resample_blocks(iter([torch.zeros(10)]), 44101, 16000)]


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), RecursionError("deep"), RuntimeError(""), KeyError("a"), OverflowError()]
)
def test_whatever_a_decoder_or_an_encoder_raises_is_a_bad_sample(dataset, monkeypatch, error):
    def fails(*args, **options):
        raise error

    data = dataset(max_bad_samples=20, shuffle=False)
    with monkeypatch.context() as patch:
        patch.setattr("data.samples.shard_dataset.decode_image_file", fails)
        items, bad = data.read_media(0, "images")
        assert not items[0].any() and "member .0.png" in bad.reason and type(error).__name__ in bad.reason
        assert "a-000000.tar, key '0000'" in str(bad)
        patch.setattr(data.tokenizer.template, "encode", fails)
        if isinstance(error, RecursionError):
            assert "RecursionError" in data.read_text(0)[1].reason
        else:  # of the program, but it says where
            with pytest.raises(type(error)) as caught:
                data.read_text(0)
            assert "a-000000.tar, key '0000'" in caught.value.__notes__[-1]
    media = replace(images(), sequence_tokens=fails)
    assert "module images cannot take it" in SampleTable([media], 24, BOUNDS).tokens_of(data.meta(0).members)[1]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_memory_that_runs_out_is_no_bad_sample(dataset, monkeypatch, error):
    def fails(*args, **options):
        raise error

    data = dataset(max_bad_samples=20, shuffle=False)
    monkeypatch.setattr("data.media.decode._decode_with_pillow", fails)
    with pytest.raises(MemoryShortage, match=r"a-000000\.tar, key '0000': .*data\.workers"):
        media_of(data, 0, "images")
    assert data.bad_samples.count == 0


def test_an_io_error_is_no_bad_sample(dataset, monkeypatch):
    data = dataset(max_bad_samples=20, read_retries=1)
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)

    def fails(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    for read in (lambda: text_of(data, 0), lambda: media_of(data, 0, "images")):
        with pytest.raises(ReadError, match=r"a-00000\d\.tar: cannot read \d+ bytes at byte \d+: .*EIO.*tried 2 times"):
            read()
    assert data.bad_samples.count == 0


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"caption": 3}, "caption is a number, not a text"),
        ({"conversations": {}}, "conversations is an object, not a list of turns"),
        ({"messages": [{"role": "\x1b[2J" * 99, "content": ""}]}, r"unknown role '\\x1b\[2J"),
    ],
)
def test_a_value_of_another_type_is_named_with_it(record, said):
    with pytest.raises(RecordError, match=said) as caught:
        parse_record(json.dumps(record).encode(), "json", "k", {})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_records_of_any_kind_are_conversations_or_bad():
    """JSON made at random of the words that records are made of, some with bytes changed."""
    draw = random.Random(0)
    words = "from value human gpt role content user assistant type text image <image> conversations messages".split()
    words += ["caption", "system", "tools", "tool_calls", "\ud800", "\x1b[31m", "image_url"]

    def value(depth):
        kind = draw.randrange(9)
        if depth > 5 or kind < 4:
            return draw.choice([*words, None, True, 0, -1.5, 1e308, "", {}, []])
        if kind < 6:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        return {draw.choice(words): value(depth + 1) for _ in range(draw.randrange(4))}

    good = 0
    for _ in range(3000):
        turn = {"from": draw.choice(["human", "gpt", value(2)]), "value": draw.choice(["<image>", value(2)])}
        message = {"role": draw.choice(["user", "assistant"]), "content": draw.choice(["", [value(3)], value(2)])}
        record = draw.choice(
            [value(0), {"conversations": [turn] * 2}, {"messages": [message, turn], "tools": value(1)}]
        )
        raw = bytearray(json.dumps(record).encode())
        if draw.random() < 0.3:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        try:
            parse_record(bytes(raw), draw.choice(["json", "a.json", "txt"]), "k", {"image": draw.randrange(2)})
            good += 1
        except RecordError as error:
            assert "key 'k'" in str(error) and str(error).isprintable(), error
    assert 100 < good < 2900
    nested = b"[" * 100_000 + b"]" * 100_000
    for raw in (nested, b'{"messages": ' + nested + b"}", b'{"tools": ' + json.dumps(nested.decode()).encode() + b"}"):
        with pytest.raises(RecordError, match="key 'k'"):
            parse_record(raw, "json", "k", {})


def test_media_of_any_bytes_are_decoded_or_bad():
    """Bytes of small files changed at random, most of them in the headers."""
    draw, kinds = random.Random(0), ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    files = [(decode_image_file, encode_image(9, 7, kind)) for kind in kinds]
    files += [(lambda raw: decode_audio(raw, 8000), clip(8000, 0.01, kind)) for kind in ("WAV", "FLAC", "AIFF")]
    bad = 0
    for _ in range(600):
        decode, whole = draw.choice(files)
        raw = bytearray(whole)
        for _ in range(draw.randrange(1, 5)):
            raw[draw.randrange(draw.choice([64, len(raw)]) % len(raw) or len(raw))] = draw.choice([0, 255, 127, 128, 1])
        try:
            decode(bytes(raw))
        except DecodeError as error:
            bad += 1
            assert str(error).strip()
        parse_header_bytes(bytes(raw))
        parse_audio_header(bytes(raw))
    assert 50 < bad < 590


def test_control_characters_of_names_reach_no_terminal(tmp_path, capsys):
    name = "\x1b]0;owned\x07k"
    members = [(f"{name}.json", b"{"), (f"{name}2.\x1b[31mjpg", b"x"), (f"{name}2.txt", b"a"), (f"{name}3.jpg", b"")]
    shard = write_tar(tmp_path / "s.tar", members)
    assert str(BadSample(0, shard, name, f"{name}\nline")).isprintable()
    for command in ("index", "inspect", "verify"):
        main(["shards", command, str(shard)])
    out = capsys.readouterr()
    assert "owned" in out.out and not {"\x1b", "\x07"} & set(out.out + out.err)


def test_verify_names_a_key_once_and_goes_on_behind_a_bad_shard(tmp_path, capsys):
    write_tar(tmp_path / "a.tar", [("ok.txt", b"fine"), ("wrong.json", b'{"caption": 3}')])
    (tmp_path / "b.tar").write_bytes(b"x" * 2000)
    write_tar(tmp_path / "c.tar", [])
    assert main(["shards", "verify", str(tmp_path)]) == 1
    out = capsys.readouterr()
    assert f"bad: {tmp_path}/a.tar: key wrong: caption is a number, not a text" in out.out.splitlines()
    assert "bad shard" in out.out and "b.tar" in out.out and "c.tar: no sample in it" in out.err
    for command in ("index", "verify"):
        assert main(["shards", command, str(tmp_path / "c.tar")]) == 1
        assert "c.tar: no sample in it" in capsys.readouterr().err


def test_a_fifo_among_the_shards_keeps_no_command_waiting(tmp_path, capsys):
    folder = tmp_path / "train"
    write_tar(folder / "a.tar", [("ok.txt", b"fine")])
    os.mkfifo(folder / "b.tar")
    here = (f"data.shards={folder}", f"data.validation_shards={folder}", "data.demo=", f"run.dir={tmp_path}/run")
    for arguments in (
        ["shards", "verify", str(folder)],
        ["shards", "index", str(folder)],
        ["check", "gpt_tiny", *here],
    ):
        assert main(arguments) == 1
        assert "b.tar: is a FIFO, not a file: a shard is a tar file" in "".join(capsys.readouterr())
