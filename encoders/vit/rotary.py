"""Rotary positions on the two axes of a picture."""

import math
from functools import lru_cache

import torch

from encoders.vit.picture import PictureSpec


def rotary_angles(spec: PictureSpec, rows: int, columns: int) -> torch.Tensor:
    """Angles of a picture of `rows` x `columns` patches, for Megatron-Core's rotation: [T, 1, 1, size of a head].

    As DINOv3 (Simeoni et al. 2025, arXiv:2508.10104, section 3.2): with d a head's size, places from -1 to 1 on either
    axis and frequencies 2 pi * base^(-4i / d), d / 4 of them for the row and as many for the column, used for both
    halves of the head. Class and register tokens are not rotated.
    """
    head = spec.hidden_size // spec.num_attention_heads
    return _angles(head, spec.rotary_base, spec.leading_tokens, rows, columns)


@lru_cache(maxsize=1024)
def _angles(head: int, base: float, leading: int, rows: int, columns: int) -> torch.Tensor:
    frequencies = 1 / base ** torch.arange(0, 1, 4 / head)
    places = [2 * torch.arange(0.5, count) / count - 1 for count in (rows, columns)]
    grid_P2 = torch.cartesian_prod(*places)
    angles = (2 * math.pi * grid_P2[:, :, None] * frequencies).flatten(1).tile(2)
    return torch.nn.functional.pad(angles, (0, 0, leading, 0))[:, None, None]


@lru_cache(maxsize=1024)
def axial_angles(head: int, base: float, rows: int, columns: int) -> torch.Tensor:
    """Angles of patches, row by row, [P, head]: with d a head's size, base^(-4i / d) times the row, then times the
    column, d / 4 of each, for both halves of the head."""
    frequencies = 1 / base ** (torch.arange(0, head // 2, 2) / (head // 2))
    grid_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return (grid_P2[:, :, None] * frequencies).flatten(1).tile(2)
