"""Patches of images of any sizes: their order, their pixels, and squares of them as tokens.

Shape suffixes: N images, P patches of all images, C channels, R rows and L columns of patches, A side of a patch in
pixels.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from encoders.staged import to_device

Grid = tuple[int, int]
"""(rows, columns) of the patches of an image."""


@lru_cache(maxsize=1024)
def token_by_token(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Return the positions (in row order) of an image's patches, token by token: squares of `merge` x `merge` patches
    in row order, and inside of each its patches in row order."""
    places = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return places.transpose(1, 2).flatten()


def gather_patches(
    images: torch.Tensor | Sequence[torch.Tensor],
    grids: Mapping[Grid, int],
    orders: Mapping[Grid, torch.Tensor],
    side: int,
) -> torch.Tensor:
    """Return the pixels of the patches of all images, [P, C, A, A]. The number of operations does not depend on the
    sizes.

    Args:
        images: [N, C, height, width], or [C, height, width] of each, those of one grid adjacent. Pixels at the right
            and lower edge outside of whole patches are not read.
        grids: number of images of each grid, in their order.
        orders: positions (in row order) of the patches of each grid, in the wanted order.
        side: side of a patch, in pixels.
    """
    if isinstance(images, torch.Tensor):
        ((rows, columns),) = grids
        cropped = images[..., : rows * side, : columns * side]
        lines_NCRALA = cropped.unflatten(-1, (columns, side)).unflatten(-3, (rows, side))
        patches_NPCAA = lines_NCRALA.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        return patches_NPCAA[:, to_device(orders[rows, columns], images.device)].flatten(0, 1)
    channels = images[0].size(0)
    of_each = (grid for grid, count in grids.items() for _ in range(count))
    cut = [image[:, : rows * side, : columns * side] for image, (rows, columns) in zip(images, of_each, strict=True)]
    lines = torch.cat([image.reshape(-1, side) for image in cut])
    # A line is the `side` pixels of an image row in one patch. Each patch has the number of its first line, and the
    # number of lines from channel to channel and from row to row.
    first, plans = 0, []
    for (rows, columns), count in grids.items():
        order, lines_of_channel = orders[rows, columns], rows * side * columns
        starts = first + channels * lines_of_channel * torch.arange(count)[:, None]
        starts = (starts + order // columns * (side * columns) + order % columns).flatten()
        plans.append(
            torch.stack([starts, *torch.tensor([lines_of_channel, columns])[:, None].expand(2, len(starts))], 1)
        )
        first += channels * lines_of_channel * count
    plan_P3 = to_device(torch.cat(plans), lines.device)
    start, channel_step, row_step = plan_P3[:, :, None, None].unbind(1)
    within = torch.arange(max(channels, side), device=lines.device)
    numbers_PCA = start + channel_step * within[:channels, None] + row_step * within[:side]
    return lines.index_select(0, numbers_PCA.flatten()).view(-1, channels, side, side)


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
