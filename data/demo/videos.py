"""Samples of the video demo: handwritten digits that move, or appear one after the other, and questions about them.

A video has 16 frames in 2 seconds. Digits move along their own row or column, from edge to edge.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from data.demo.samples import CANVAS, CELL, COLOURS, DemoSample, Digits, blend, render
from data.media.audio_files import import_av

FRAMES, RATE = 16, 8
"""Frames of a video, and frames per second."""

_ORDER_SHARE = 0.4
_LANES = CANVAS // CELL
_WAYS = (("left", "right"), ("up", "down"))


def make_video_sample(digits: Digits, rng: np.random.Generator, questions: int = 1) -> DemoSample:
    """Return a sample drawn from `rng`, with up to `questions` different questions about its video.

    Raises MissingLibrary if PyAV is not installed.
    """
    count = 2 if rng.random() < 0.7 else 1
    appears = rng.random() < _ORDER_SHARE
    chosen = _draw_different(digits, 2 if appears else count, rng)
    values = [str(digits.labels[at]) for at in chosen]
    tops_and_lefts, asked = _appear(values, rng) if appears else _move(values, rng)
    colours = rng.permutation(len(COLOURS))[: len(chosen)].tolist()
    inks = [render(digits.scans[at], rng) for at in chosen]
    video = np.full((FRAMES, CANVAS, CANVAS, 3), rng.integers(0, 24), dtype=np.uint8)
    for ink, colour, corners in zip(inks, colours, tops_and_lefts, strict=True):
        for frame, corner in zip(video, corners, strict=True):
            if corner is not None:
                top, left = corner
                blend(frame[top : top + CELL, left : left + CELL], ink, colour)
    shuffled = [asked[at] for at in rng.permutation(len(asked))[:questions].tolist()]
    turns = [turn for question, answer in shuffled for turn in (("user", question), ("assistant", answer))]
    turns[0] = ("user", "<video>\n" + turns[0][1])
    return DemoSample(turns, [("mp4", _encode(video))], digits.sources[chosen].tolist())


def _draw_different(digits: Digits, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the numbers of `count` scans of different digits."""
    labels = rng.permutation(10)[:count]
    return np.array([rng.choice(np.flatnonzero(digits.labels == label)) for label in labels])


_Corners = list[tuple[int, int] | None]
"""(top, left) of a digit in each frame, in pixels; None: it is not there."""


def _appear(values: list[str], rng: np.random.Generator) -> tuple[list[_Corners], list[tuple[str, str]]]:
    """Return the corners of two digits, each alone for half of the video, and questions with answers."""
    absent: _Corners = [None] * (FRAMES // 2)
    places = [(int(top) * CELL, int(left) * CELL) for top, left in rng.integers(0, _LANES, size=(2, 2))]
    first: _Corners = [places[0]] * (FRAMES // 2)
    last: _Corners = [places[1]] * (FRAMES // 2)
    asked = list(zip(("Which digit came first?", "Which digit came last?"), values, strict=True))
    return [first + absent, absent + last], asked


def _move(values: list[str], rng: np.random.Generator) -> tuple[list[_Corners], list[tuple[str, str]]]:
    """Return the corners of digits that move along lanes of one axis, and questions with answers."""
    axis = int(rng.integers(2))
    lanes = (rng.permutation(_LANES)[: len(values)] * CELL).tolist()
    backwards = rng.integers(2, size=len(values)).tolist()
    # The first and the last two frames are equal, so that every other frame has both ends.
    shares = np.maximum(np.arange(FRAMES) - 1, 0) / (FRAMES - 2)
    paths: list[_Corners] = []
    for lane, is_backwards in zip(lanes, backwards, strict=True):
        steps = np.round((1 - shares if is_backwards else shares) * (CANVAS - CELL)).astype(int).tolist()
        paths.append([(step, lane) if axis else (lane, step) for step in steps])
    ways = [_WAYS[axis][1 - is_backwards] for is_backwards in backwards]
    if len({*ways}) == len(ways) and rng.random() < 0.5:
        asked = [(f"Which digit moves {way}?", value) for value, way in zip(values, ways, strict=True)]
    else:
        asked = [(f"Which way does the {value} move?", way) for value, way in zip(values, ways, strict=True)]
    return paths, asked


def _encode(video: np.ndarray) -> bytes:
    """Return uint8 [frames, height, width, 3] as an MP4 file with H.264, which browsers play."""
    av = import_av("and encodes videos")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        # With macroblock trees x264's vector code reads uninitialised memory: a video would have other bytes each time.
        options = {"crf": "18", "preset": "veryfast", "threads": "1", "x264-params": "mbtree=0"}
        stream: Any = file.add_stream("libx264", rate=RATE, options=options)
        stream.height, stream.width, stream.pix_fmt = video.shape[1], video.shape[2], "yuv420p"
        for frame in video:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()
