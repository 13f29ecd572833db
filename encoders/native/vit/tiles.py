"""Images of any size as tiles of one size (AnyRes; LLaVA-NeXT, Liu et al. 2024; pooling as in LLaVA-OneVision, Li et
al. 2024, arXiv 2408.03326, section 4.1).

An image is read twice: whole, as one tile, and cut. To be cut it is resized to fit into one of several canvases and
centred there. In the sequence its tile comes first; then the features of the canvas line by line, without those of
the border alone, each line with a learned row behind it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

UNCUT = (0, 0)
"""Extent of an image that is not cut, whatever its size."""


@dataclass(frozen=True)
class Tiling:
    """How the features of an image become its tokens. All counts are of features."""

    rows: int
    columns: int
    """Tiles of the canvas; both 0: there is none."""
    side: int
    """Of a tile."""
    top: int = 0
    left: int = 0
    """Of the border that is left out, as much at the opposite side."""
    pooled: tuple[int, int] | None = None
    """(rows, columns) to which what is left is averaged; None: it is kept as it is."""

    @property
    def tiles(self) -> int:
        """With that of the whole image."""
        return 1 + self.rows * self.columns

    @property
    def inner(self) -> tuple[int, int]:
        """(rows, columns) without the border."""
        return self.rows * self.side - 2 * self.top, self.columns * self.side - 2 * self.left

    @property
    def tokens(self) -> int:
        """In the sequence, learned rows included. One is behind an image that is not cut."""
        if not self.rows:
            return self.side**2 + 1
        rows, columns = self.pooled or self.inner
        return self.side**2 + rows * (columns + 1)


def best_canvas(height: int, width: int, canvases: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(height, width) in pixels of the canvas that keeps most pixels of an image, and of those the one with the
    smallest border; the first of several."""
    best, kept_most, least_waste = (0, 0), 0, math.inf
    for rows, columns in canvases:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        waste = rows * columns - kept
        if kept > kept_most or (kept == kept_most and waste < least_waste):
            best, kept_most, least_waste = (rows, columns), kept, waste
    return best


def tiling(height: int, width: int, canvas: tuple[int, int], tile: int, side: int, most: int) -> Tiling:
    """
    Args:
        height, width: of the image, in pixels.
        canvas: (height, width) in pixels.
        tile: side of a tile in pixels; side: in features.
        most: tiles beyond whose features they are averaged; 0: they are not.
    """
    rows, columns = canvas[0] // tile, canvas[1] // tile
    high, wide = rows * side, columns * side
    # Rounded to 7 places, as in the published models: elsewhere some images get another border.
    if width / height > wide / high:
        top, left = (high - int(round(height * (wide / width), 7))) // 2, 0
    else:
        top, left = 0, (wide - int(round(width * (high / height), 7))) // 2
    found = Tiling(rows, columns, side, top, left)
    inner_rows, inner_columns = found.inner
    ratio = math.sqrt(inner_rows * inner_columns / (most * side**2)) if most else 0.0
    if ratio <= POOLED_FROM:
        return found
    return Tiling(rows, columns, side, top, left, (int(inner_rows // ratio), int(inner_columns // ratio)))


POOLED_FROM = 1.1
"""Ratio of sides, of the features to those of the most tiles, above which they are averaged."""
