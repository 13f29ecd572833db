"""Videos are as many images as `data.video` says: which, in which order, and what of them is bad."""

import io
import json
import random
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.errors import DataError, DecodeError, MissingLibrary
from data.index.indexing import build_index
from data.media import video
from data.media.headers import parse_video_header_bytes
from data.media.options import Bounds
from data.media.video import decode_frames, decode_video
from data.records.members import read_fields
from data.samples.media_spec import Sampling
from data.samples.originals import read_originals
from mimo_train.cli import main
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images, media_of
from tests.videos import STEP, make_video, patched

av = pytest.importorskip("av")

TWO = Sampling(frames_per_second=1.0, max_frames=2)


def shown(raw, count, bounds=None):
    """Which of the images of `make_video` are read."""
    return brightness(decode_video(raw, count, bounds or Bounds()))


def brightness(frames):
    """Numbers of images of `make_video`."""
    return [round(float(frame.float().mean()) / STEP) for frame in frames]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mov", "libx264"),
        ("mp4", "libx265"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("mkv", "libx264"),
    ],
)
def test_images_are_those_in_the_middle_of_equal_parts(kind, codec):
    raw = make_video(kind, codec)
    header = parse_video_header_bytes(raw)
    assert (header.height, header.width, header.milliseconds, header.turns) == (48, 64, 3000, 0)
    assert shown(raw, 1) == [15] and shown(raw, 3) == [5, 15, 25] and shown(raw, 6) == [2, 7, 12, 17, 22, 27]
    # More than it has: each comes several times.
    assert shown(raw, 60) == [at // 2 for at in range(60)]
    assert (header.frames, header.rate) == (30, 10) and brightness(decode_frames(raw, [3, 3, 14, 29])) == [3, 3, 14, 29]
    with pytest.raises(DecodeError, match="it has 30 frames, and none has the number 30"):
        list(decode_frames(raw, [30]))
    (image,) = decode_video(raw, 1)
    assert image.dtype == torch.uint8 and tuple(image.shape) == (3, 48, 64)


def test_the_number_of_images_follows_from_length_and_config():
    sampling = Sampling(frames_per_second=2.0, max_frames=5)
    lengths = [1, 499, 500, 999, 1000, 2499, 2500, 60_000, 2**31 - 1]
    assert [sampling.count(one) for one in lengths] == [1, 1, 1, 1, 2, 4, 5, 5, 5]
    assert sampling.counts(np.array(lengths)).tolist() == [sampling.count(one) for one in lengths]
    assert Sampling(29.97, 10**6).count(100_000) == 2997
    tenths = [(rate, seconds) for rate in range(1, 40) for seconds in range(10, 200, 10)]
    assert all(Sampling(rate / 10, 2**16).count(seconds * 1000) == rate * seconds // 10 for rate, seconds in tenths)


def test_only_what_is_needed_is_decoded(monkeypatch):
    decoded = []
    real = video._Decoder._decoded
    monkeypatch.setattr(video._Decoder, "_decoded", lambda self: (decoded.append(one) or one for one in real(self)))
    assert [at % 32 for at in (30, 90)] == shown(make_video(images=120, key_every=10), 2) and len(decoded) <= 4
    decoded.clear()
    raw = make_video("mp4", "libx264", images=120, key_every=10, options={"bf": "3", "sc_threshold": "0"})
    assert [at % 32 for at in (30, 90)] == shown(raw, 2) and len(decoded) <= 4
    assert [at % 32 for at in (30, 90)] == shown(make_video(images=120, key_every=1000), 2) and len(decoded) > 90


@pytest.mark.parametrize(("matrix", "turns"), [((0, 1, -1, 0), 1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 3)])
def test_a_video_is_upright(matrix, turns):
    raw, noise = bytearray(make_video(seed=1)), list(decode_video(make_video(seed=1), 2))
    at = raw.index(b"tkhd") + 44
    a, b, c, d = (one << 16 for one in matrix)
    raw[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    header = parse_video_header_bytes(bytes(raw))
    assert (header.height, header.width) == ((64, 48) if turns % 2 else (48, 64))
    turned = list(decode_video(bytes(raw), 2))
    assert all(torch.equal(one, torch.rot90(other, -turns, (1, 2))) for one, other in zip(turned, noise, strict=True))
    # As libavformat has it, counted the other way.
    with av.open(io.BytesIO(bytes(raw))) as file:
        assert (next(file.decode(video=0)).rotation + 90 * turns) % 360 == 0
    raw[at : at + 4] = struct.pack(">i", 5)
    assert parse_video_header_bytes(bytes(raw)) is None


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_lengths_and_sizes_that_are_not_so_are_bad(kind):
    raw = make_video(kind, "libvpx" if kind == "webm" else "mpeg4", height=272, width=272)
    if kind == "mp4":  # frames have their lengths, and an edit list may only shorten that
        assert parse_video_header_bytes(patched(raw, b"elst", 8, ">I", 60_000)).milliseconds == 3000
        cut = patched(raw, b"elst", 8, ">I", 2000)
        assert parse_video_header_bytes(cut).milliseconds == 2000 and shown(cut, 2) == [5, 15]
    for milliseconds in (300, 60_000) if kind == "webm" else ():  # packets say how long it is
        lie = patched(raw, b"\x44\x89\x88", 0, ">d", milliseconds)
        assert parse_video_header_bytes(lie).milliseconds == 3000 and shown(lie, 2) == [7, 22]
    width = (b"\xb0\x82", 0, ">H") if kind == "webm" else (b"mp4v", 28 - 4, ">H")
    at = raw.index(b"stsd") if kind == "mp4" else 0
    lie = raw[:at] + patched(raw[at:], *width, 16)
    if kind == "mp4":  # its stream says the size, too
        assert parse_video_header_bytes(lie).width == 272 and shown(lie, 2) == [7, 22]
        return
    assert parse_video_header_bytes(lie).width == 16
    with pytest.raises(DecodeError):
        shown(lie, 2)


def test_a_file_that_is_cut_or_damaged_is_bad_and_nothing_else():
    draw = random.Random(5)
    for kind, codec in (("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mov", "mpeg4")):
        raw = make_video(kind, codec, seed=3)
        for cut in (0, 3, 11, 40, len(raw) // 2, len(raw) - 1):
            assert parse_video_header_bytes(raw[:cut]) is None
            with pytest.raises(DecodeError, match="no header"):
                shown(raw[:cut], 2)
        for _ in range(40):
            broken = bytearray(raw)
            for _ in range(draw.choice([1, 8, 200])):
                broken[draw.randrange(len(raw))] = draw.randrange(256)
            try:
                assert len(shown(bytes(broken), 3)) == 3
            except DecodeError:
                pass


@pytest.mark.parametrize(
    "raw",
    [b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"\x1aE\xdf\xa3" * 9],
)
def test_lists_of_other_files_are_not_opened(raw):
    with pytest.raises(DecodeError, match="no header"):
        shown(raw, 1)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ({"pixels": 3000}, r"48 x 64 = 3072 pixels, above data\.bounds\.pixels 3000"),
        ({"seconds": 2.5}, r"3 seconds, above data\.bounds\.seconds 2\.5"),
    ],
)
def test_what_is_above_a_bound_is_bad_with_its_number(bound, said, dataset, tmp_path):
    path = write_tar(tmp_path / "s.tar", [("k.mp4", make_video()), ("k.json", chat("<video>q", "a"))])
    data = dataset(path, bounds=Bounds(**bound), sampling=TWO, max_bad_samples=1)
    bad = data.read_media(0, "images")[1]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(bad.reason)
    assert data.meta(0).bad_reason is not None
    assert data.plan_step(0, 1).tokens["images"].tolist() == [0]


def test_a_video_is_its_images_in_every_part_of_a_sample(dataset, tmp_path):
    still, film = encode_image(20, 30, "PNG", value=7), make_video()
    samples = [
        [("a.mp4", film), ("a.json", chat("<video>\nq", "a"))],
        [("b.0.png", still), ("b.1.mp4", film), ("b.json", chat("see <image> and <video>?", "a"))],
        [("c.mp4", film), ("c.png", still), ("c.json", chat("<video>then<image>", "a"))],
        [("d.0.mp4", film), ("d.1.mp4", make_video(images=10)), ("d.txt", b"two films")],
        [("e.0.png", still), ("e.1.png", still), ("e.2.png", still), ("e.json", chat("<image>or<video>", "a"))],
        [("f.webm", make_video("webm", "libvpx")), ("f.json", json.dumps({"messages": TYPED}).encode())],
    ]
    path = write_tar(tmp_path / "s.tar", [member for sample in samples for member in sample])
    data = dataset(path, sampling=TWO, sequence_length=90, shuffle=False)
    counts = [2, 3, 3, 3, 3, 2]
    grey = [[7, 22], [None, 7, 22], [7, 22, None], [7, 22, 5], [None] * 3, [7, 22]]
    step = data.plan_step(0, 6)
    for number, count in enumerate(counts):
        sample, bad = data.read_text(number)
        assert bad is None, bad
        frames_as_images, bad = data.read_media(number, "images")
        assert bad is None and len(frames_as_images) == count
        assert (sample.input_ids == data.tokenizer.placeholder_id("<image>")).sum() == 4 * count
        found = [round(float(one.float().mean()) / STEP) for one in frames_as_images]
        assert found == [round(7 / STEP) if value is None else value for value in grey[number]]
        assert step.tokens["images"][number] == data.token_counts(number)["images"] == 4 * count
        assert data.lengths_of(0, number) == [sample.length]
        (last,), bad = data.read_media(number, "images", [count - 1])
        assert bad is None and last.equal(frames_as_images[-1])
    assert step.media["images"].parts.tolist() == [2, 2, 1, 2, 2, 2, 2, 1, 2, 2, 1, 1, 1, 1, 2, 2]
    # Where the text marks them, one behind the other.
    placeholder = data.tokenizer.placeholder_id("<image>")
    text = data.read_text(2)[0].input_ids.tolist()
    first = text.index(placeholder)
    assert text[first : first + 8] == [placeholder] * 8 and bytes(text[first + 8 : first + 12]) == b"then"
    other = dataset(path, sampling=Sampling(2.0, 4), sequence_length=90, shuffle=False)
    assert other.lengths_keys() != data.lengths_keys() and len(other.read_media(0, "images")[0]) == 4


TYPED = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "q"}]},
    {"role": "assistant", "content": "a"},
]


def test_a_video_may_be_one_item(dataset, tmp_path):
    """As models' processors read them: frames of their choice, and text from the extent alone."""

    def text(*extent_and_number):
        *extent, number = extent_and_number
        return (f"{extent[2] / extent[3]:g} s", [pad] * tokens(*extent), "") if len(extent) > 2 else ("", [pad] * 4, "")

    def tokens(*extent):
        return 6 if len(extent) > 2 else 4

    def read(decode, extent, parts):
        chosen = [[0, 1], [extent[2] - 1]]
        return [{"frames": torch.stack([*decode(chosen[part])]), "extent": extent} for part in parts]

    pad = 262
    media = replace(
        images(), sequence_tokens=tokens, size=lambda *extent: extent, text=text, read_video=read,
        video_frames=lambda *extent: [0, 1, extent[2] - 1], video_parts=lambda *extent: 2, identity="a",
        cut_several=False,
    )  # fmt: skip
    still, film = encode_image(20, 30, "PNG", value=7), make_video()
    members = [
        ("a.0.png", still), ("a.1.mp4", film), ("a.json", chat("see <image> and <video>?", "a")),
        ("b.mp4", film[:900]), ("b.json", chat("<video>q", "a")),
    ]  # fmt: skip
    data = dataset(write_tar(tmp_path / "s.tar", members), [media], 60, shuffle=False, max_bad_samples=1)
    assert data.tokenizer.placeholder_id("<image>") == pad
    sample, bad = data.read_text(0)
    ids = sample.input_ids.tolist()
    assert bad is None and bytes(token for token in ids if token < 256).decode().count("3 s") == 1
    assert ids.count(pad) == 10 == data.token_counts(0)["images"]
    assert data.plan_step(0, 2).tokens["images"].tolist() == [10, 0]
    items = data.plan_step(0, 2).media["images"]
    columns = (items.places, items.numbers, items.tokens, items.parts)
    assert [column.tolist() for column in columns] == [[0] * 3, [0, 1, 2], [4, 3, 3], [1, 2, 2]]
    (image, *parts), bad = data.read_media(0, "images")
    assert bad is None and [brightness(item["frames"]) for item in parts] == [[0, 1], [29]]
    assert parts[0]["extent"] == (48, 64, 30, 10, 1)
    ((item,), bad) = data.read_media(0, "images", [2])
    assert bad is None and brightness(item["frames"]) == [29]
    assert data.input_sizes(0, "images") == [(20, 30), *[(48, 64, 30, 10, 1)] * 2]
    assert data.input_sizes(0, "images", [0, 2]) == [(20, 30), (48, 64, 30, 10, 1)]
    originals = read_originals(data, 0)
    assert originals["video"] == [film] and [*originals["image"][0].shape] == [3, 20, 30]
    assert "cut off" in data.read_text(1)[1].reason
    for modules, key in (([media], "modules.images.encoder.video"), ([images()], "data.video")):
        reason = dataset(tmp_path / "s.tar", modules, 5, shuffle=False).meta(0).bad_reason
        assert reason.endswith(f"Raise it, or use smaller media, or fewer frames of videos ({key})")
    other = replace(images(), module="details", placeholder="<image:details>")
    with pytest.raises(DataError, match="modules.images reads videos as such, and modules.details as images"):
        dataset(tmp_path / "s.tar", [media, other])


@pytest.mark.parametrize(
    ("names", "asked", "said"),
    [
        (["mp4"], "q", r"0 video placeholders, but the sample has 1 video member"),
        (["mp4", "png"], "<image><video>q", r"marks <image>, <video>, but the members are \.mp4, \.png"),
        (["png"], "<video>q", r"no numbered images .* \(its images: \.png\)"),
        (["0.png", "1.png"], "<image><image><video>q", "no numbered images"),
        (["ts"], "<video>q", r"\(its images: none\)"),
    ],
)
def test_videos_that_do_not_fit_their_record_are_bad(names, asked, said, dataset, tmp_path):
    media = [(f"k.{name}", encode_image(8, 8, "PNG") if "png" in name else make_video()) for name in names]
    path = write_tar(tmp_path / "s.tar", [*media, ("k.json", chat(asked, "a"))])
    bad = dataset(path, sampling=TWO).read_text(0)[1]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(bad.reason)


def test_a_run_without_images_takes_no_video(dataset, tmp_path):
    path = write_tar(tmp_path / "s.tar", [("k.mp4", make_video()), ("k.json", chat("<video>q", "a"))])
    assert "1 video member, but no module" in dataset(path, media=(), max_bad_samples=1).read_text(0)[1].reason


def test_fields_say_which_videos_are_read(dataset, tmp_path):
    members = [("k.mp4", make_video()), ("k.jpg", encode_image(8, 8)), ("k.json", chat("<image>q", "a"))]
    path = write_tar(tmp_path / "s.tar", members)
    data = dataset(path, fields=read_fields({"conversations": "json[conversations]", "image": "jpg"}))
    assert data.read_text(0)[1] is None and len(data.read_media(0, "images")[0]) == 1
    assert list(data.unread_members()) == [("mp4", "a video that data.fields does not name")]
    write_tar(path, [*members[:2], ("k.json", chat("<video>q", "a"))])
    data = dataset(path, fields=read_fields({"conversations": "json[conversations]", "video": "mp4"}), sampling=TWO)
    assert data.read_text(0)[1] is None and len(data.read_media(0, "images")[0]) == 2
    assert data.plan_step(0, 1).tokens["images"].tolist() == [8]


def test_without_its_library_a_video_ends_the_run_and_names_the_extra(dataset, tmp_path, monkeypatch):
    """It is not bad: with `data.max_bad_samples`, a run would train on zeros in its place."""
    path = write_tar(tmp_path / "s.tar", [("k.mp4", make_video()), ("k.json", chat("<video>q", "a"))])
    data = dataset(path, sampling=TWO)
    monkeypatch.setitem(sys.modules, "av", None)
    assert data.read_text(0)[1] is None
    with pytest.raises(MissingLibrary, match=r"s\.tar, key 'k': .*pip install 'mimo-train\[video\]'"):
        data.read_media(0, "images")
    with pytest.raises(MissingLibrary, match=r"s\.tar: .*pip install 'mimo-train\[video\]'"):
        build_index(path)


def test_a_video_is_decoded_once_for_a_module(dataset, tmp_path, monkeypatch):
    from data.samples import shard_dataset

    calls = []
    real = shard_dataset.decode_video
    monkeypatch.setattr(shard_dataset, "decode_video", lambda *given: calls.append(given[1]) or real(*given))
    path = write_tar(tmp_path / "s.tar", [("k.mp4", make_video()), ("k.json", chat("<video>q", "a"))])
    tiles = images(side=16)
    assert len(media_of(dataset(path, media=(tiles,), sampling=TWO), 0, "images")) == 2
    assert calls == [2]


def test_commands_know_videos(tmp_path, capsys):
    path = write_tar(tmp_path / "s.tar", [("k.mp4", make_video()), ("k.json", chat("<video>q", "a"))])
    assert main(["shards", "verify", str(path)]) == 0 and main(["shards", "inspect", str(path)]) == 0
    assert ".mp4 48x64, 3.00 s, .json" in capsys.readouterr().out
    write_tar(path, [("k.mp4", make_video(sound=2)), ("k.json", chat("<video>q", "a"))])
    assert main(["shards", "inspect", str(path)]) == 0
    assert ".mp4 48x64, 3.00 s, 2.00 s of sound" in capsys.readouterr().out
    path = write_tar(tmp_path / "t.tar", [("k.mp4", make_video()[:-9]), ("k.json", chat("<video>q", "a"))])
    assert main(["shards", "verify", str(path)]) == 1
    assert "no header of a video" in capsys.readouterr().out


def test_shards_are_built_of_records_with_videos(tmp_path):
    (tmp_path / "one.mp4").write_bytes(make_video())
    records = [
        {"video": "one.mp4", "caption": "a film"},
        {"video": ["one.mp4"], "conversations": json.loads(chat("<video>q", "a"))["conversations"]},
    ]
    (tmp_path / "records.json").write_text(json.dumps(records))
    assert main(["shards", "build", str(tmp_path / "records.json"), "--to", str(tmp_path / "out")]) == 0
    assert main(["shards", "verify", str(tmp_path / "out" / "train")]) == 0
    (tmp_path / "one.mp4").write_bytes(make_video()[:-50])
    assert main(["shards", "build", str(tmp_path / "records.json"), "--to", str(tmp_path / "other")]) != 0
