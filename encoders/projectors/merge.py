"""Merge adjacent patches into one token (pixel shuffle), and arrange the features of tiles as lines."""

from collections.abc import Sequence

import torch

from encoders.native.vit.positions import interpolate
from encoders.native.vit.tiles import Tiling


def merge_patches(features_NPH: torch.Tensor, rows: int, columns: int, merge: int) -> torch.Tensor:
    """Join each `merge` x `merge` square of patches.

    Args:
        features_NPH: features of `rows` x `columns` patches, row by row, [N, rows * columns, H].
        merge: side of the square; must divide rows and columns.

    Returns:
        [N, rows * columns / merge^2, H * merge^2]; the square's features are concatenated row by row.
    """
    if merge == 1:
        return features_NPH
    images, _, hidden = features_NPH.shape
    squares = features_NPH.reshape(images, rows // merge, merge, columns // merge, merge, hidden)
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(images, -1, merge * merge * hidden)


def lines_of_tiles(features: torch.Tensor, tilings: Sequence[Tiling], newline: torch.Tensor) -> torch.Tensor:
    """Arrange the features of tiled images as lines.

    Args:
        features: [rows, H], image by image: first of the whole image's tile, then of the other tiles in row order, each
            [side^2, H].
        tilings: tiling of each image.
        newline: the row after a line, [H].

    Returns:
        [sum of `Tiling.tokens`, H], in the order of the images.
    """
    images = features.split([item.tiles * item.side**2 for item in tilings])
    newline = newline.to(features.dtype)
    return torch.cat([_lines_of_image(rows, tiling, newline) for rows, tiling in zip(images, tilings, strict=True)])


def _lines_of_image(rows: torch.Tensor, tiling: Tiling, newline: torch.Tensor) -> torch.Tensor:
    thumbnail, tiles = rows.split([tiling.side**2, len(rows) - tiling.side**2])
    if not tiling.rows:
        return torch.cat([thumbnail, newline[None]])
    canvas = tiles.view(tiling.rows, tiling.columns, tiling.side, tiling.side, -1).transpose(1, 2)
    canvas_RCH = canvas.reshape(tiling.rows * tiling.side, tiling.columns * tiling.side, -1)
    inner = tiling.inner
    lines_RCH = canvas_RCH[tiling.top : tiling.top + inner[0], tiling.left : tiling.left + inner[1]]
    if tiling.pooled:
        # One matrix per axis: the gradient of torch's interpolation is not deterministic on CUDA.
        lines_RCH = interpolate(lines_RCH, *tiling.pooled, "bilinear")
    ends = newline.expand(len(lines_RCH), 1, -1)
    return torch.cat([thumbnail, torch.cat([lines_RCH, ends], dim=1).flatten(0, 1)])
