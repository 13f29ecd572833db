"""Options of media: size limits, resizing, and the colour behind transparent pixels.

A header can claim any size: 65,535 x 65,535 pixels are some hundred bytes of JPEG and 13 GB decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from data.errors import DataError

CONFIGURABLE = ("pixels", "seconds", "video_bytes", "record_bytes", "placeholders")
"""The `Bounds` that a config sets."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a sample: a sample above one is bad. Those in `CONFIGURABLE` are config keys `data.bounds.NAME`."""

    pixels: int = 100_000_000
    """Pixels of an image or video frame, also after resizing and padding."""
    seconds: float = 3600.0
    """Length of an audio file or video."""
    sample_rate: int = 384_000
    """Audio samples a second."""
    video_bytes: int = 1_073_741_824
    """Size of a video file."""
    video_frames: int = 1_000_000
    """Frames in a video, whether they are read or not."""
    video_pixels: int = 100_000_000_000
    """Pixels decoded from a video, also those of frames between the ones that are read."""
    record_bytes: int = 16_777_216
    """Size of a `json` or `txt` member."""
    record_depth: int = 64
    """Depth of nested lists and objects in a record."""
    turns: int = 1000
    """Turns of a conversation."""
    placeholders: int = 4096
    """Images and audio files of a sample; a video counts as the frames that are read of it."""

    def of_image(self, height: int, width: int) -> str | None:
        """Return the exceeded bound of an image, as text; None if there is none."""
        pixels = height * width
        return None if pixels <= self.pixels else self._above(f"{height} x {width} pixels are", pixels, "pixels")

    def of_resized(self, height: int, width: int) -> str | None:
        """Return the exceeded bound of a resized or padded image; None if there is none."""
        pixels = height * width
        if pixels <= self.pixels:
            return None
        return self._above(f"read as a part of {height} x {width} pixels, these are", pixels, "pixels")

    def of_clip(self, frames: int, rate: int) -> str | None:
        """Return the exceeded bound of audio with `frames` samples per channel; None if there is none."""
        return self._above("its rate in Hz is", rate, "sample_rate") or self._above(
            "its length in seconds is", frames / rate, "seconds"
        )

    def of_video(self, size: int, milliseconds: int) -> str | None:
        """Return the exceeded bound of a video of `size` bytes; None if there is none."""
        return self._above("its bytes are", size, "video_bytes") or self._above(
            "its length in seconds is", milliseconds / 1000, "seconds"
        )

    def of_frames(self, number: int) -> str | None:
        """Return the exceeded bound of a video with `number` frames; None if there is none."""
        return self._above("its images are", number, "video_frames")

    def of_video_pixels(self, number: int) -> str | None:
        """Return the exceeded bound of `number` pixels decoded from a video; None if there is none."""
        return self._above("to read it, pixels are decoded:", number, "video_pixels")

    def of_record(self, size: int) -> str | None:
        """Return the exceeded bound of a record of `size` bytes; None if there is none."""
        return self._above("its bytes are", size, "record_bytes")

    def of_turns(self, number: int) -> str | None:
        """Return the exceeded bound of a conversation with `number` turns; None if there is none."""
        return self._above("its turns are", number, "turns")

    def of_placeholders(self, number: int) -> str | None:
        """Return the exceeded bound of `number` images and audio items; None if there is none."""
        return self._above("its images and clips are", number, "placeholders")

    def _above(self, what: str, value: float, name: str) -> str | None:
        bound = getattr(self, name)
        limit = f"data.bounds.{name}" if name in CONFIGURABLE else "the limit of"
        return f"{what} {value:.10g}, above {limit} {bound:.10g}" if value > bound else None


BOUNDS = Bounds()


@dataclass(frozen=True)
class Resize:
    """How to resize an image to `Media.size`."""

    interpolation: str = "bicubic"
    """`bicubic` or `bilinear`, both with antialiasing."""
    shortest_edge: int = 0
    """Pixels of the shorter side before the centre is cropped; 0: no crop, both sides are resized to `Media.size`."""
    tile: int = 0
    """Side of a tile in pixels; 0: no tiles."""
    background: tuple[int, int, int] = (0, 0, 0)
    """RGB of the padding to a square, for images that are not cut into tiles although others are."""
    rounded: bool = True
    """True to round pixels to uint8; else float32 from 0 to 255."""

    def whole(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of an image before its centre is cropped."""
        shortest = min(height, width)
        return self.shortest_edge * height // shortest, self.shortest_edge * width // shortest

    def largest(self, height: int, width: int, cut: bool = True) -> tuple[int, int]:
        """Return the largest (height, width) during resizing: before cropping, or padded to a square if not `cut`."""
        if self.tile and not cut:
            return max(height, width), max(height, width)
        return self.whole(height, width) if self.shortest_edge else (height, width)


STRETCHED = Resize()

READING = 3
"""Version of the decoders. Raise it if a file gives different pixels or audio samples."""

Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
"""RGB of the default background."""

_NAMED: dict[str, Colour | None] = {"white": WHITE, "black": (0, 0, 0), "grey": (128, 128, 128), "none": None}


def colour_of(text: str) -> Colour | None:
    """Return the colour of `data.background`; None ignores transparency. Raises DataError."""
    if text in _NAMED:
        return _NAMED[text]
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise DataError(f"must be {', '.join(_NAMED)} or #RRGGBB, is {text!r}")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue
