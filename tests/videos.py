"""Small videos, made by PyAV."""

import io
import struct
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

STEP = 8
"""By how much each image is brighter than the one before."""


def make_video(
    kind="mp4",
    codec="mpeg4",
    images=30,
    rate=10,
    height=48,
    width=64,
    key_every=12,
    seed=None,
    *,
    times=None,
    unit=None,
    options=None,
    muxer=None,
    rotation=0,
    form="yuv420p",
    sound=0,
    is_stream=False,
) -> bytes:
    """Image n is grey of `STEP` n; with a seed, noise.

    Args:
        times: of each image in `unit`, Fraction; default: n / rate.
        options, muxer: of the codec and the container.
        rotation: degrees counterclockwise that a player turns it.
        form: layout of pixels.
        sound: seconds of a sound track.
        is_stream: written to what cannot seek.
    """
    import av

    raw = io.BytesIO()
    noise = np.random.default_rng(seed)
    unit, times = unit or Fraction(1) / rate, times or range(images)
    target = SimpleNamespace(write=raw.write) if is_stream else raw
    quality = {"qscale": "2", "flags": "+qscale"}
    with av.open(target, "w", format="matroska" if kind == "mkv" else kind, container_options=muxer or {}) as file:
        stream = file.add_stream(codec, rate=rate, options=quality | (options or {}))
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, form, key_every
        stream.time_base = stream.codec_context.time_base = unit
        if rotation:
            stream.set_display_rotation(rotation)
        track = file.add_stream("libopus" if kind in ("webm", "mkv") else "aac", rate=48000) if sound else None
        for at, time in enumerate(times):
            pixels = np.full((height, width, 3), STEP * at % 256, dtype=np.uint8)
            if seed is not None:
                pixels = noise.integers(0, 256, pixels.shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, unit
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        for at in range(int(sound * 50)):
            wave = noise.integers(-9999, 9999, (1, 2 * 960), dtype=np.int16)
            block = av.AudioFrame.from_ndarray(wave, format="s16", layout="stereo")
            block.sample_rate, block.pts, block.time_base = 48000, 960 * at, Fraction(1, 48000)
            file.mux(track.encode(block))
        if track:
            file.mux(track.encode(None))
    return raw.getvalue()


def patched(raw: bytes, name: bytes, skip: int, form: str, *values: int | float) -> bytes:
    """Return a file with other numbers `skip` bytes after the first `name`."""
    changed, at = bytearray(raw), raw.index(name) + len(name) + skip
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


_SMALL = {"height": 24, "width": 32, "seed": 1}
_B = {"bf": "3", "b_strategy": "0"}
_OPEN = _B | {"x264-params": "open-gop=1:scenecut=0:keyint=10:min-keyint=10"}
_QUIET = "bframes=3:scenecut=0:keyint=10:min-keyint=10:log-level=none"
_UNEVEN = {"times": [0, 1, 2, 9, 10, 30, 31, 70, 71, 72, 90], "rate": 30, "unit": Fraction(1, 30)}


def _edited(codec: str, start: int, length: int) -> bytes:
    """Return an MP4 file of 3 s whose edit list shows `length` units of 1 ms from `start` / 10240 s on."""
    return patched(make_video("mp4", codec, options=_B, **_SMALL), b"elst", 8, ">2i", length, start)


def _without_length() -> bytes:
    raw = make_video(**_SMALL)
    for name, skip in ((b"mvhd", 16), (b"mdhd", 16), (b"tkhd", 20)):
        raw = patched(raw, name, skip, ">I", 0)
    return raw


def _with_hidden_frames() -> bytes:
    """Return a VP8 video with two frames that others may need, and that are not presented."""
    import av

    raw = bytearray(make_video("webm", "libvpx", **_SMALL))
    with av.open(io.BytesIO(raw)) as file:
        packets = [bytes(packet) for packet in file.demux(video=0)]
    for number in (5, 20):
        raw[raw.index(packets[number])] &= ~0x10  # show_frame, RFC 6386, section 9.1
    return bytes(raw)


ODD_VIDEOS = {
    "1 frame a second": lambda: make_video(images=7, rate=1, **_SMALL),
    "120 frames a second": lambda: make_video("mp4", "libx264", images=90, rate=120, **_SMALL),
    "120 frames a second, mkv": lambda: make_video("mkv", "libx264", images=90, rate=120, **_SMALL),
    "29.97, mov": lambda: make_video("mov", "libx264", rate=Fraction(30000, 1001), **_SMALL),
    "23.976, webm": lambda: make_video("webm", "libvpx-vp9", rate=Fraction(24000, 1001), **_SMALL),
    "variable rate": lambda: make_video("mp4", "libx264", **_UNEVEN, **_SMALL),
    "variable rate, mkv": lambda: make_video("mkv", "libx264", **_UNEVEN, **_SMALL),
    "one frame": lambda: make_video(images=1, **_SMALL),
    "one frame, webm": lambda: make_video("webm", "libvpx", images=1, **_SMALL),
    "odd size": lambda: make_video("webm", "libvpx-vp9", height=21, width=37, seed=1),
    "odd size, 4:4:4": lambda: make_video("mp4", "libx264", height=21, width=37, seed=1, form="yuv444p"),
    "rotated by 90": lambda: make_video(rotation=90, **_SMALL),
    "rotated by 180, mov": lambda: make_video("mov", "libx264", rotation=180, **_SMALL),
    "rotated by 270, mkv": lambda: make_video("mkv", "libx264", rotation=270, **_SMALL),
    "b-frames": lambda: make_video("mp4", "libx264", options=_B, **_SMALL),
    "b-frames, mpeg4": lambda: make_video("mp4", "mpeg4", options=_B, **_SMALL),
    "interlaced": lambda: make_video(
        "mp4", "libx264", options=_B | {"x264-params": "tff=1"}, height=64, width=64, seed=1
    ),
    "open gop": lambda: make_video("mp4", "libx264", images=60, options=_OPEN, **_SMALL),
    "open gop, hevc": lambda: make_video(
        "mp4", "libx265", images=60, options={"x265-params": f"open-gop=1:{_QUIET}"}, **_SMALL
    ),
    "open gop, mpeg2, mkv": lambda: make_video("mkv", "mpeg2video", rate=25, options=_B, **_SMALL),
    "no key frames": lambda: make_video(
        "mp4", "libx264", images=60, options={"x264-params": "intra-refresh=1:keyint=10"}, **_SMALL
    ),
    "live, mkv": lambda: make_video("mkv", "libx264", muxer={"live": "1"}, is_stream=True, **_SMALL),
    "from a pipe, webm": lambda: make_video("webm", "libvpx-vp9", is_stream=True, **_SMALL),
    "fragmented": lambda: make_video(
        "mp4", "libx264", muxer={"movflags": "frag_keyframe+empty_moov"}, options=_B, **_SMALL
    ),
    "no length in the header": _without_length,
    "edit list": lambda: _edited("libx264", 5420, 1500),
    "edit list, mpeg4": lambda: _edited("mpeg4", 7168, 1300),
    "a frame without bytes": lambda: patched(make_video("mp4", "libx264", **_SMALL), b"stsz", 12 + 4 * 29, ">I", 0),
    "starts before 0": lambda: make_video(
        "mp4", "libx264", times=range(-5, 25), muxer={"avoid_negative_ts": "disabled"}, options=_B, **_SMALL
    ),
    "starts later": lambda: make_video("mp4", "libx264", times=range(7, 37), options=_B, **_SMALL),
    "starts later, mkv": lambda: make_video("mkv", "libx264", times=range(7, 37), options=_B, **_SMALL),
    "units of 1/90000": lambda: make_video(
        "mov", "libx264", times=range(0, 90090, 3003), unit=Fraction(1, 90000), rate=30, **_SMALL
    ),
    "units of 1/600": lambda: make_video("mp4", "libx264", muxer={"video_track_timescale": "600"}, rate=24, **_SMALL),
    "hidden frames, vp8": _with_hidden_frames,
    "av1, webm": lambda: make_video("webm", "libsvtav1", images=20, height=64, width=64, seed=1),
    "10 bits, hevc, mkv": lambda: make_video(
        "mkv", "libx265", options={"x265-params": _QUIET}, form="yuv420p10le", **_SMALL
    ),
    "mjpeg": lambda: make_video("mov", "mjpeg", form="yuvj420p", **_SMALL),
    "longer sound": lambda: make_video("mp4", "libx264", sound=5, **_SMALL),
    "longer sound, webm": lambda: make_video("webm", "libvpx", sound=5, **_SMALL),
    "4 hours": lambda: make_video(images=14400, rate=1, height=16, width=16, key_every=100),
}
"""Name -> maker of a video that players play."""


def frames_of(raw: bytes) -> np.ndarray:
    """Return all frames of a video, uint8 [frames, 3, height, width]."""
    import av

    with av.open(io.BytesIO(raw)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]).transpose(0, 3, 1, 2)
