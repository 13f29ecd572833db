"""Learned positions interpolated to other grids, and rotary positions."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from encoders.native.vit.patches import Grid


class Taps(NamedTuple):
    """What makes the position of each patch of an image, row by row: a weighted sum of some of those learned."""

    places: torch.Tensor
    """Of the learned ones in their grid, row by row: int64 [patches, taps]."""
    weights: torch.Tensor
    """float32 [patches, taps]."""


@lru_cache(maxsize=256)
def position_taps(
    rows: int,
    columns: int,
    learned: Grid,
    method: str = "bicubic",
    antialias: bool = False,
    corners: bool = False,
) -> Taps:
    """Positions of an image of `rows` x `columns` patches, each at its place in the grid that was learned.

    Bicubic interpolation over the grid, as Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929, section 3.2) do to read
    larger images. Of the same grid each is the learned one.

    Args:
        learned: rows and columns of the grid that was learned.
        method: `bicubic` or `bilinear`.
        antialias: whether positions of a finer grid are averaged.
        corners: whether the corners of both grids are at the same places.
    """
    (down, down_weights), (across, across_weights) = (
        _taps_on(before, after, method, antialias, corners)
        for before, after in zip(learned, (rows, columns), strict=True)
    )
    places = down[:, None, :, None] * learned[1] + across[None, :, None, :]
    weights = down_weights[:, None, :, None] * across_weights[None, :, None, :]
    return Taps(places.flatten(0, 1).flatten(1), weights.flatten(0, 1).flatten(1).float())


def _taps_on(before: int, after: int, method: str, antialias: bool, corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """On one axis: places on a line of `before` values, and their weights, for each place of a line of `after`; as many
    for each, of which some may have no weight."""
    if before == after:
        return torch.arange(before)[:, None], torch.ones(before, 1, dtype=torch.float64)
    weights = _weights(before, after, method, antialias, corners)
    most = int((weights != 0).sum(dim=1).max())
    places = weights.abs().argsort(dim=1, descending=True, stable=True)[:, :most]
    return places, weights.gather(1, places)


def interpolate(
    values_RCH: torch.Tensor,
    rows: int,
    columns: int,
    method: str = "bicubic",
    antialias: bool = False,
    corners: bool = False,
) -> torch.Tensor:
    """Values on a grid at the places of another of `rows` x `columns`.

    It is written as one matrix per axis: the gradient of a matrix product is the same at every run, that of torch's own
    interpolation is not on CUDA.

    Args:
        values_RCH: R x C of them.
        method: `bicubic` or `bilinear`.
        antialias: whether values of a finer grid are averaged.
        corners: whether the corners of both grids are at the same places.

    Returns:
        [rows, columns, H]; the same values, to rounding, if the grid is the same.
    """
    down, across = (
        _weights_on(before, after, method, antialias, corners, values_RCH.device, values_RCH.dtype)
        for before, after in zip(values_RCH.shape[:2], (rows, columns), strict=True)
    )
    return torch.einsum("rR,cC,RCH->rcH", down, across, values_RCH)


@lru_cache(maxsize=1024)
def _weights_on(
    before: int, after: int, method: str, antialias: bool, corners: bool, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    # Kept on the device: the host waits for a copy to it.
    return _weights(before, after, method, antialias, corners).to(device, dtype)


def _weights(before: int, after: int, method: str, antialias: bool, corners: bool) -> torch.Tensor:
    """[after, before]: how much of each value on a line of `before` there is at each place of a line of `after`."""
    lines = torch.eye(before, dtype=torch.float64)[None, None]
    resized = torch.nn.functional.interpolate(
        lines, size=(before, after), mode=method, align_corners=corners, antialias=antialias
    )
    return resized[0, 0].T


@lru_cache(maxsize=1024)
def relative_angles(head: int, base: float, rows: int, columns: int) -> torch.Tensor:
    """Angles of patches, row by row, [patches, head].

    As DINOv3 (Simeoni et al. 2025, arXiv:2508.10104, section 3.2): with d a head's size, places from -1 to 1 on either
    axis and frequencies 2 pi * base^(-4i / d), d / 4 of them for the row and as many for the column, used for both
    halves of the head.
    """
    frequencies = 1 / base ** torch.arange(0, 1, 4 / head)
    places = [2 * torch.arange(0.5, count) / count - 1 for count in (rows, columns)]
    grid_P2 = torch.cartesian_prod(*places)
    return (2 * math.pi * grid_P2[:, :, None] * frequencies).flatten(1).tile(2)


@lru_cache(maxsize=1024)
def axial_angles(head: int, base: float, rows: int, columns: int) -> torch.Tensor:
    """Angles of patches, row by row, [P, head]: with d a head's size, base^(-4i / d) times the row, then times the
    column, d / 4 of each, for both halves of the head."""
    frequencies = 1 / base ** (torch.arange(0, head // 2, 2) / (head // 2))
    grid_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return (grid_P2[:, :, None] * frequencies).flatten(1).tile(2)
