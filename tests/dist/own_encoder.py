"""A plain encoder as a user would write it: its spec, and the module beside it."""

from dataclasses import dataclass

import torch

from encoders.plain.spec import ImageSpec


@dataclass
class ConvSpec(ImageSpec):
    """Squares of pixels through two layers."""

    image_size: int = 48
    hidden_size: int = 32
    stride: int = 16
    """Pixels of a side of a square."""

    builder = "tests.dist.own_encoder:Conv"

    def grid(self, height, width):
        return height // self.stride, width // self.stride

    def num_parameters(self):
        return (3 * self.stride**2 + 1) * self.hidden_size + (self.hidden_size + 1) * self.hidden_size


class Conv(torch.nn.Module):
    """Images [N, 3, height, width] -> [N, squares, hidden_size]."""

    def __init__(self, spec):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, spec.hidden_size, spec.stride, spec.stride)
        self.mix = torch.nn.Linear(spec.hidden_size, spec.hidden_size)
        self.drop = torch.nn.Dropout(spec.dropout)

    def forward(self, pixels):
        return self.mix(self.drop(torch.nn.functional.gelu(self.patches(pixels).flatten(2).transpose(1, 2))))
