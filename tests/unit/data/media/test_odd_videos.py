"""Headers count the frames that are presented, and a frame by its number is that of a complete decode, bit for bit."""

import io
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
import torchaudio

from data.errors import DecodeError
from data.media.audio import decode_sound
from data.media.headers import parse_video_header_bytes
from data.media.options import Bounds
from data.media.video import decode_frames
from tests.videos import ODD_VIDEOS, make_video, patched

av = pytest.importorskip("av")

DAY = Bounds(seconds=86_400)


@pytest.mark.parametrize("name", ODD_VIDEOS)
def test_frames_are_those_of_a_complete_decode(name):
    raw = ODD_VIDEOS[name]()
    with av.open(io.BytesIO(raw)) as file:
        file.streams.video[0].codec_context.thread_count = 1
        rate, frames = Fraction(file.streams.video[0].average_rate), []
        for frame in file.decode(video=0):
            image = torch.from_numpy(frame.to_ndarray(format="rgb24", threads=1)).permute(2, 0, 1)
            frames.append(torch.rot90(image, frame.rotation // 90, (1, 2)))
    header = parse_video_header_bytes(raw)
    assert (header.sound > 0) == ("sound" in name)
    assert header.frames == len(frames) and (3, header.height, header.width) == tuple(frames[0].shape)
    if name == "variable rate, mkv":  # PyAV says 30, which the file states of all
        assert rate == 30 and header.rate == Fraction(11000, 3033)
    else:
        assert header.rate == rate
    draw = random.Random(name)
    every = range(len(frames)) if len(frames) < 100 else []
    for numbers in (every, *(sorted(draw.choices(range(len(frames)), k=size)) for size in (3, 9))):
        decoded = decode_frames(raw, numbers, DAY)
        assert all(torch.equal(image, frames[at]) for at, image in zip(numbers, decoded, strict=True)), numbers


@pytest.mark.parametrize("name", ["longer sound", "longer sound, webm"])
def test_the_sound_of_a_video_is_that_of_pyav(name):
    raw = ODD_VIDEOS[name]()
    with av.open(io.BytesIO(raw)) as file:
        parts = [frame.to_ndarray() for frame in file.decode(audio=0)]
    expected = torch.from_numpy(np.concatenate(parts, axis=1).mean(axis=0))
    wave, milliseconds = decode_sound(raw, 48000), parse_video_header_bytes(raw).sound
    assert 0 <= milliseconds - len(wave) / 48 < 8  # the last block of Opus in WebM is cut by its decoder
    assert torch.equal(wave, expected) and abs(len(wave) - 5 * 48000) < 2048
    low = torchaudio.functional.resample(wave, 48000, 16000)
    assert torch.equal(decode_sound(raw, 16000), low)
    samples, end = 16 * milliseconds, torch.zeros(16 * milliseconds - len(low))
    assert torch.equal(decode_sound(raw, 16000, samples), torch.cat([low, end]))
    with pytest.raises(DecodeError, match=r"its header says that it has 6\.00 s of sound, and it has 5\.\d\d s"):
        decode_sound(raw, 16000, 6 * 16000)
    with pytest.raises(DecodeError, match=r"seconds, above data\.bounds\.seconds 4"):
        decode_sound(raw, 16000, bounds=Bounds(seconds=4))
    with pytest.raises(DecodeError, match="no sound track in it"):
        decode_sound(make_video(), 16000)


def _other_media(raw):
    """The header of one file, with the media of another that is as long."""
    other, at = make_video("mp4", "libx264", seed=9), raw.index(b"mdat") + 4
    end = raw.index(b"moov") - 4
    media = (other[other.index(b"mdat") + 4 :] * 9)[: end - at]
    return raw[:at] + media + raw[end:]


def _no_video(raw):
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("aac", rate=48000)
        out.mux([*track.encode(_silence()), *track.encode(None)])
    return file.getvalue()


def _silence():
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 2048), np.int16), format="s16", layout="stereo")
    frame.sample_rate = 48000
    return frame


_CUT = "it is cut off, or damaged: its parts end at byte"
BROKEN = {
    "empty": (lambda raw: b"", "the file is empty"),
    "not a video": (lambda raw: b"GIF89a" + raw, "it does not start as an MP4, MOV, WebM or Matroska file"),
    "cut off": (lambda raw: raw[:-9], _CUT),
    "webm, cut off": (lambda raw: make_video("webm", "libvpx")[:-9], _CUT),
    "live, cut off": (lambda raw: ODD_VIDEOS["live, mkv"]()[:-9], _CUT),
    "recording did not end": (lambda raw: raw[: raw.index(b"moov") - 4], r"it has no header \(a box moov\)"),
    "no picture": (_no_video, "no video track in it"),
    "no times": (
        lambda raw: make_video("mkv", "libx264", times=range(-5, 5), muxer={"avoid_negative_ts": "disabled"}),
        "a frame or a block of sound in it has no time",
    ),
    "unknown codec": (
        lambda raw: raw.replace(b"avc1\0\0\0", b"zzzz\0\0\0"),
        "FFmpeg has no decoder of its video track",
    ),
    "mirrored": (
        lambda raw: patched(raw, b"tkhd", 40, ">i", -1 << 16),
        r"its display matrix \(-1.0, 0.0, 0.0, 1.0\) is not a rotation by quarters",
    ),
    "media of another file": (_other_media, "cannot decode [0-9]+ bytes of video: InvalidDataError"),
    "frames after the end": (
        lambda raw: patched(raw, b"stco", 8, ">I", 10_000),
        "its header says that it has 30 frames, and it has 2[0-9]",
    ),
    "damaged frames": (
        lambda raw: patched(make_video(seed=3), b"mdat", 3000, "50s", bytes(range(50))),
        "cannot decode [0-9]+ bytes of video: InvalidDataError",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_video_says_what_is_wrong(name):
    change, message = BROKEN[name]
    raw = change(make_video("mp4", "libx264", seed=3))
    with pytest.raises(DecodeError, match=message):
        list(decode_frames(raw, range(30)))
