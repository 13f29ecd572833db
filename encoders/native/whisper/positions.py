"""Sinusoidal positions of Whisper, which are not parameters."""

import math

import torch


def sinusoids(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Return positions [length, width] in float32: sines, then cosines, of wavelengths from 2 pi to 10000 * 2 pi
    (Whisper's `sinusoids`)."""
    half = width // 2
    rates = torch.exp(-math.log(10000) / max(half - 1, 1) * torch.arange(half, device=device))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
