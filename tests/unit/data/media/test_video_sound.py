"""The sound of videos: an item of audio, whose tokens are in the text of the video."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.media.audio import decode_sound
from data.samples.media_spec import Media
from data.samples.originals import read_originals
from tests.tars import write_tar
from tests.unit.data.helpers import chat, images
from tests.videos import make_video

av = pytest.importorskip("av")

IMAGE, AUDIO = 262, 263
FRAMES = 6
"""Tokens of the frames of a video."""


def _tokens(samples, rate):
    return samples // rate + (samples > rate // 10)


def _text(*extent_and_number):
    """Frames, one token of sound in the middle of them, and the others behind."""
    *extent, _ = extent_and_number
    if len(extent) < 6:
        return "", [IMAGE] * FRAMES, ""
    half, sound = [IMAGE] * (FRAMES // 2), _tokens(extent[5], 1000)
    return "", [*half, AUDIO, *half, *[AUDIO] * (sound - 1)], ""


def _modules(sound=True):
    video = replace(
        images(), sequence_tokens=lambda *extent: FRAMES, size=lambda *extent: extent, text=_text, sound=sound,
        read_video=lambda decode, extent, _: [{"extent": extent, "frames": len([*decode([0, 9])])}],
        video_frames=lambda *extent: [0, 9], grid=lambda *extent: (1, 3, 2, 1.0, *_sound(extent)),
    )  # fmt: skip
    audio = Media("audio", "audio", "<audio>", _tokens, lambda samples, rate: (16 * samples * 1000 // rate, 16000))
    return [video, audio]


def _sound(extent):
    return (_tokens(extent[5], 1000), 1) if len(extent) > 5 else ()


def _wav(samples):
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.full(samples, 0.25), 1000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _without_packets(raw):
    """A video whose packets of sound are damaged."""
    raw = bytearray(raw)
    with av.open(io.BytesIO(bytes(raw))) as file:
        for packet in file.demux(audio=0):
            if at := raw.find(bytes(packet)) if packet.size > 8 else 0:
                raw[at : at + packet.size] = b"\xff" * packet.size
    return bytes(raw)


def test_sound_is_an_item_of_audio_in_the_text_of_its_video(dataset, tmp_path):
    heard, silent = make_video(sound=2.5), make_video()
    members = [
        ("a.0.wav", _wav(3500)), ("a.1.mp4", silent), ("a.2.mp4", heard),
        ("a.json", chat("<audio> <video> <video>", "x")),
        ("b.0.wav", _wav(3500)), ("b.1.mp4", heard), ("b.json", chat("<video> <audio>", "x")),
        ("c.mp4", _without_packets(heard)), ("c.json", chat("<video>q", "x")),
        ("d.mp4", heard), ("d.json", chat("<audio> <video>", "x")),
        ("e.mp4", make_video(sound=0.05)), ("e.json", chat("<video>q", "x")),
    ]  # fmt: skip
    shard = write_tar(tmp_path / "s.tar", members)
    data = dataset(shard, _modules(), 60, shuffle=False, max_bad_samples=4)
    assert [data.tokenizer.placeholder_id(name) for name in ("<image>", "<audio>")] == [IMAGE, AUDIO]
    sample, bad = data.read_text(0)
    assert bad is None
    clip, sound = [AUDIO] * 4, [*[IMAGE] * 3, AUDIO, *[IMAGE] * 3, *[AUDIO] * 2]
    ids = sample.input_ids.tolist()
    assert [token for token in ids if token in (IMAGE, AUDIO)] == [*clip, *[IMAGE] * 6, *sound]
    at = next(place for place in range(len(ids)) if ids[place : place + len(sound)] == sound)
    first = sample.positions[0, at]
    assert (sample.positions[:, at : at + len(sound)] - first)[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert data.token_counts(0) == {"images": 12, "audio": 4 + 3}
    planned = data.plan_step(0, 4)
    assert planned.tokens["audio"].tolist() == [7, 7, 3, 3] and planned.tokens["images"].tolist() == [12, 6, 6, 6]
    assert planned.media["audio"].numbers.tolist() == [0, 1, 0, 1, 0, 0]
    (wave, heard_wave), bad = data.read_media(0, "audio")
    expected = decode_sound(heard, 16000)
    assert bad is None and len(wave) == 56000 and len(heard_wave) % 16 == 0
    assert torch.equal(heard_wave[: len(expected)], expected) and not heard_wave[len(expected) :].any()
    (alone,), _ = data.read_media(0, "audio", [1])
    assert torch.equal(alone, heard_wave)
    (first, second), _ = data.read_media(0, "images")
    assert len(first["extent"]) == 5 and second["extent"][:5] == first["extent"] and second["extent"][5] >= 2500
    originals = read_originals(data, 0)
    assert originals["video"] == [silent, heard] and len(originals["audio"]) == 1
    assert (
        "marks <video>, <audio>, but its audio and videos with sound are .0.wav, .1.mp4" in data.read_text(1)[1].reason
    )
    stand_in = data.read_text(1)[0].input_ids.tolist()
    assert stand_in.count(IMAGE) == 6 and stand_in.count(AUDIO) == 7
    zeros, bad = data.read_media(2, "audio")
    assert "member .mp4" in bad.reason and len(zeros) == 1 and not zeros[0].any()
    assert data.read_media(2, "images")[1] is None
    assert "1 audio placeholder, but the sample has 0 audio members" in data.read_text(3)[1].reason
    assert "too short for a token of module audio" in data.read_text(4)[1].reason
    assert data.plan_step(4, 1).tokens["images"].tolist() == [0] == data.plan_step(4, 1).tokens["audio"].tolist()
    without = dataset(shard, _modules(sound=False), 60, shuffle=False, max_bad_samples=4)
    assert without.token_counts(0) == {"images": 12, "audio": 4} and len(without.read_media(0, "audio")[0]) == 1
    assert without.read_text(1)[1] is None
