"""Learned positions of one grid of patches, read at the places of another."""

from functools import lru_cache

import torch


def interpolate_positions(
    positions_RCH: torch.Tensor,
    rows: int,
    columns: int,
    method: str = "bicubic",
    antialias: bool = False,
    corners: bool = False,
) -> torch.Tensor:
    """Positions of a picture of `rows` x `columns` patches, each at its place in the grid that was learned.

    Bicubic interpolation over the grid, as Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929, section 3.2) do to read
    larger pictures. It is written as one matrix per axis: the gradient of a matrix product is the same at every run,
    that of torch's own bicubic interpolation is not on CUDA.

    Args:
        positions_RCH: learned positions, R x C of them.
        method: `bicubic` or `bilinear`.
        antialias: whether positions of a finer grid are averaged.
        corners: whether the corners of both grids are at the same places.

    Returns:
        [rows, columns, H]; the same values, to rounding, if the grid is the same.
    """
    down, across = (
        _weights_on(before, after, method, antialias, corners, positions_RCH.device, positions_RCH.dtype)
        for before, after in zip(positions_RCH.shape[:2], (rows, columns), strict=True)
    )
    return torch.einsum("rR,cC,RCH->rcH", down, across, positions_RCH)


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
