"""Learned positions interpolated to other grids, and rotary positions."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from encoders.native.vit.patches import Grid


class Taps(NamedTuple):
    """The position of each patch of an image, in row order, as a weighted sum of learned positions."""

    places: torch.Tensor
    """Indices of the learned positions in their grid, in row order: int64 [patches, taps]."""
    weights: torch.Tensor
    """Weights, float32 [patches, taps]."""


@lru_cache(maxsize=256)
def position_taps(
    rows: int,
    columns: int,
    learned: Grid,
    method: str = "bicubic",
    antialias: bool = False,
    corners: bool = False,
) -> Taps:
    """Return the positions of an image of `rows` x `columns` patches, interpolated in the learned grid, as in
    Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929, section 3.2).

    Args:
        learned: rows and columns of the learned grid.
        method: `bicubic` or `bilinear`.
        antialias: True to average values of a finer grid.
        corners: True if the corners of both grids coincide.
    """
    (down, down_weights), (across, across_weights) = (
        _taps_on(before, after, method, antialias, corners)
        for before, after in zip(learned, (rows, columns), strict=True)
    )
    places = down[:, None, :, None] * learned[1] + across[None, :, None, :]
    weights = down_weights[:, None, :, None] * across_weights[None, :, None, :]
    return Taps(places.flatten(0, 1).flatten(1), weights.flatten(0, 1).flatten(1).float())


def _taps_on(before: int, after: int, method: str, antialias: bool, corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the taps on one axis: indices on a line of `before` values and their weights, for each index of a line of
    `after`. All have the same number of taps, some of weight 0."""
    if before == after:
        return torch.arange(before)[:, None], torch.ones(before, 1, dtype=torch.float64)
    weights = _weights(before, after, method, antialias, corners)
    most = int((weights != 0).sum(dim=1).max())
    places = weights.abs().argsort(dim=1, descending=True, stable=True)[:, :most]
    return places, weights.gather(1, places)


def _weights(before: int, after: int, method: str, antialias: bool, corners: bool) -> torch.Tensor:
    """Return [after, before]: the weight of each value on a line of `before` at each index of a line of `after`."""
    lines = torch.eye(before, dtype=torch.float64)[None, None]
    resized = torch.nn.functional.interpolate(
        lines, size=(before, after), mode=method, align_corners=corners, antialias=antialias
    )
    return resized[0, 0].T


@lru_cache(maxsize=1024)
def relative_angles(head: int, base: float, rows: int, columns: int) -> torch.Tensor:
    """Return the angles of patches in row order, [patches, head]. As in DINOv3 (Simeoni et al. 2025, arXiv:2508.10104,
    section 3.2): with d a head's size, positions are from -1 to 1 on either axis, and frequencies are 2 pi * base^(-4i
    / d). d / 4 of them are for the row and as many for the column, used for both halves of the head."""
    frequencies = 1 / base ** torch.arange(0, 1, 4 / head)
    places = [2 * torch.arange(0.5, count) / count - 1 for count in (rows, columns)]
    grid_P2 = torch.cartesian_prod(*places)
    return (2 * math.pi * grid_P2[:, :, None] * frequencies).flatten(1).tile(2)


@lru_cache(maxsize=1024)
def axial_angles(head: int, base: float, rows: int, columns: int) -> torch.Tensor:
    """Return the angles of patches in row order, [P, head]. With d a head's size: base^(-4i / d) times the row, then
    times the column, d / 4 of each, for both halves of the head."""
    frequencies = 1 / base ** (torch.arange(0, head // 2, 2) / (head // 2))
    grid_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return (grid_P2[:, :, None] * frequencies).flatten(1).tile(2)
