"""Patches of pictures of any sizes: their order, and their pixels.

Shape suffixes: P patches of all pictures, C channels, A side of a patch in pixels.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from encoders.copies import to_device

Grid = tuple[int, int]
"""(rows, columns) of the patches of a picture."""


@lru_cache(maxsize=1024)
def token_by_token(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Places in a picture, row by row, of its patches in the order of tokens: squares of `merge` x `merge` patches row
    by row, and inside of each its patches row by row."""
    places = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return places.transpose(1, 2).flatten()


def gather_patches(
    pictures: torch.Tensor | Sequence[torch.Tensor], grids: Sequence[Grid], orders: Sequence[torch.Tensor], side: int
) -> torch.Tensor:
    """Pixels of the patches of all pictures, [P, C, A, A], by operations whose number does not depend on the sizes.

    Args:
        pictures: [N, C, height, width], or [C, height, width] of each. Pixels at the right and lower edge that make no
            whole patch are not read.
        grids: of each picture.
        orders: for each picture the places in it, row by row, of its patches in the order in which they are wanted.
        side: of a patch, in pixels.
    """
    if isinstance(pictures, torch.Tensor):
        rows, columns = grids[0]
        lines = pictures[..., : rows * side, : columns * side].reshape(-1, side)
        channels = pictures.size(1)
    else:
        cut = [one[:, : rows * side, : columns * side] for one, (rows, columns) in zip(pictures, grids, strict=True)]
        lines = torch.cat([one.reshape(-1, side) for one in cut])
        channels = len(pictures[0])
    # A line is `side` pixels of a row of a picture that are in one patch. Of each patch: number of its first one among
    # all lines, and how many lines there are from channel to channel and from row to row.
    first, plans = 0, []
    for (rows, columns), order in zip(grids, orders, strict=True):
        start = first + order // columns * (side * columns) + order % columns
        steps = torch.tensor([rows * side * columns, columns]).expand(len(order), 2)
        plans.append(torch.cat([start[:, None], steps], 1))
        first += channels * rows * side * columns
    plan_P3 = to_device(torch.cat(plans), lines.device)
    start, channel_step, row_step = plan_P3[:, :, None, None].unbind(1)
    within = torch.arange(max(channels, side), device=lines.device)
    numbers_PCA = start + channel_step * within[:channels, None] + row_step * within[:side]
    return lines.index_select(0, numbers_PCA.flatten()).view(-1, channels, side, side)
