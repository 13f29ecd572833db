"""Options of media: size limits, resizing, and the colour behind transparent pixels.

A header can claim any size: 65,535 x 65,535 pixels are some hundred bytes of JPEG and 13 GB decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Limits of a sample, the config keys `data.bounds.NAME`. A sample above one is bad."""

    pixels: int = 100_000_000
    """Pixels of an image or video frame, also after resizing and padding."""
    seconds: float = 3600.0
    """Length of an audio file or video."""

    def excess(self, name: str, value: float) -> str | None:
        """Return that a value is above the bound `name`, as text; None if it is not."""
        bound = getattr(self, name)
        return f"{value:.10g} {name}, above data.bounds.{name} {bound:.10g}" if value > bound else None

    def excess_of_extent(self, kind: str, first: int, second: int) -> str | None:
        """Return `excess` of an item's extent (`media.headers.parse_extent`)."""
        if kind == "audio":
            return self.excess("seconds", first / second)
        excess = self.excess("pixels", first * second)
        return excess and f"{first} x {second} = {excess}"


BOUNDS = Bounds()


@dataclass(frozen=True)
class Resize:
    """Options for resizing an image to `Media.size`."""

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

    def uncropped(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of an image before its centre is cropped."""
        shortest = min(height, width)
        return self.shortest_edge * height // shortest, self.shortest_edge * width // shortest

    def largest(self, height: int, width: int, cut: bool = True) -> tuple[int, int]:
        """Return the largest (height, width) during resizing: before cropping, or padded to a square if not `cut`."""
        if self.tile and not cut:
            return max(height, width), max(height, width)
        return self.uncropped(height, width) if self.shortest_edge else (height, width)


STRETCHED = Resize()

READING = 6
"""Version of the decoders. Raise it if a file gives different pixels or audio samples, or another number of items."""

Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
"""RGB of the default background."""

COLOURS: dict[str, Colour | None] = {"white": WHITE, "black": (0, 0, 0), "grey": (128, 128, 128), "none": None}


def is_colour(text: str) -> bool:
    """True for a name in COLOURS, or #RRGGBB."""
    return text in COLOURS or bool(re.fullmatch(r"#[0-9a-fA-F]{6}", text))


def colour_of(text: str) -> Colour | None:
    """Return the colour of a `data.background` that `is_colour`; None ignores transparency."""
    if text in COLOURS:
        return COLOURS[text]
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue
