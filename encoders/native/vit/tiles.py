"""Images of any size as tiles of one size (AnyRes; LLaVA-NeXT, Liu et al. 2024; pooling as in LLaVA-OneVision, Li et
al. 2024, arXiv 2408.03326, section 4.1).

An image is read twice: whole as one tile, and cut into tiles. For the cut it is resized to fit into one of several
canvases and centered there. The whole image's tile comes first in the sequence. Then come the features of the canvas
line by line, without the border, each line followed by a learned row.

A frame of a video is one tile, whose features are averaged to half their rows and columns. One learned row follows the
last frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

UNCUT = (0, 0)
"""Extent of an image that is not cut, whatever its size."""


@dataclass(frozen=True)
class Tiling:
    """The mapping of an image's features to its tokens. All counts are of features."""

    rows: int
    columns: int
    """Tiles of the canvas; both 0: there is none."""
    side: int
    """Side of a tile."""
    top: int = 0
    left: int = 0
    """Width of the omitted border, on this and on the opposite side."""
    pooled: tuple[int, int] | None = None
    """(rows, columns) to which the rest is averaged, or each frame; None: not averaged."""
    frames: int = 0
    """Frames of a video; 0: an image."""

    @property
    def tiles(self) -> int:
        """Number of tiles, with that of the whole image."""
        return self.frames or 1 + self.rows * self.columns

    @property
    def inner(self) -> tuple[int, int]:
        """(rows, columns) without the border."""
        return self.rows * self.side - 2 * self.top, self.columns * self.side - 2 * self.left

    @property
    def tokens(self) -> int:
        """Tokens in the sequence, learned rows included. One follows an image that is not cut, or a video."""
        if self.frames and self.pooled:
            return self.frames * math.prod(self.pooled) + 1
        if not self.rows:
            return self.side**2 + 1
        rows, columns = self.pooled or self.inner
        return self.side**2 + rows * (columns + 1)


def video_tiling(frames: int, side: int) -> Tiling:
    """Return the tiling of a video whose frames have `side` x `side` features."""
    half = math.ceil(side / 2)
    return Tiling(0, 0, side, pooled=(half, half), frames=frames)


def best_canvas(height: int, width: int, canvases: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return (height, width) in pixels of the canvas that keeps most pixels of an image. Ties go to the smallest
    border, then to the first canvas."""
    best, kept_most, least_waste = (0, 0), 0, math.inf
    for rows, columns in canvases:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        waste = rows * columns - kept
        if kept > kept_most or (kept == kept_most and waste < least_waste):
            best, kept_most, least_waste = (rows, columns), kept, waste
    return best


def tiling(height: int, width: int, canvas: tuple[int, int], tile: int, side: int, most: int) -> Tiling:
    """Return the tiling of an image on a canvas.

    Args:
        height, width: of the image, in pixels.
        canvas: (height, width) in pixels.
        tile: side of a tile in pixels.
        side: side of a tile in features.
        most: tiles beyond whose features they are averaged; 0: never.
    """
    rows, columns = canvas[0] // tile, canvas[1] // tile
    high, wide = rows * side, columns * side
    # Rounded to 7 places, as in the published models: otherwise some images get another border.
    if width / height > wide / high:
        top, left = (high - int(round(height * (wide / width), 7))) // 2, 0
    else:
        top, left = 0, (wide - int(round(width * (high / height), 7))) // 2
    result = Tiling(rows, columns, side, top, left)
    inner_rows, inner_columns = result.inner
    ratio = math.sqrt(inner_rows * inner_columns / (most * side**2)) if most else 0.0
    if ratio <= POOLED_FROM:
        return result
    return Tiling(rows, columns, side, top, left, (int(inner_rows // ratio), int(inner_columns // ratio)))


POOLED_FROM = 1.1
"""Ratio of sides, to those of the `most` tiles, above which features are averaged."""
