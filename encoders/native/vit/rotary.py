"""Rotary positions on the two axes of a picture, for Megatron-Core's rotation."""

import math
from functools import lru_cache

import torch


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
