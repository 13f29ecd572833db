"""Initial weights drawn as a function of (seed, row, column), the same on every machine and at any layout.

A rank draws only its part of a weight, and gets the same numbers as a cut of the whole weight. Columns are in strips.
The numbers of a strip are a stream of Philox4x64 (Salmon et al. 2011, doi 10.1145/2063384.2063405), row by row, which
can start anywhere.

A number is the normal distribution's inverse at 31 random bits, interpolated linearly in a table with 256 places for
each halving of the probability. It is off by less than 3e-6, and at most 6.23 from 0. Only look-ups, single additions
and multiplications are made, which IEEE 754 rounds in one way. Numbers of torch depend on the CPU's instructions, and
logarithms on the version of a library.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.utils import skip_init

_STRIP = 64
"""Columns of a strip, of which a rank draws all or none."""
_BLOCKS = _STRIP // 8
"""Philox blocks in a row of a strip: each gives 4 x 64 bits, two numbers per 64 bits."""
_ROWS = 256
"""Rows drawn at once, which fit in caches."""
_PLACES = 256
"""Table places for each halving of the probability."""
_MANTISSA = 15
"""Bits of a float below those that choose the place."""
_ONE = 127 * _PLACES
"""Place of 1.0 among all floats."""


@dataclass(frozen=True)
class Normal:
    """Initial weights of a normal distribution around 0 with deviation `std`; callable, as Megatron-Core's
    `init_method`. Every weight takes its seed from torch's generator, so weights seeded by layer are drawn by layer."""

    std: float

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Draw a whole weight of any shape. In two dimensions it equals the parts of `draw_part`."""
        if weight.dim() == 2:
            self.draw_part(weight)
            return weight
        flat, seed = weight.detach().reshape(-1), next_seed()
        full = len(flat) // _STRIP
        fill(flat[: full * _STRIP].view(full, _STRIP), self.std, seed)
        fill(flat[full * _STRIP :].view(1, -1), self.std, seed, row=full)
        weight.detach().copy_(flat.view_as(weight))
        return weight

    def draw_part(self, weight: torch.Tensor, dim: int = 0, rank: int = 0, ranks: int = 1, pieces: int = 1) -> None:
        """Draw this rank's part of a weight.

        Args:
            weight: the part, [rows, columns].
            dim: the dimension that is cut.
            rank: index of the part.
            ranks: number of parts.
            pieces: equal pieces of the whole weight along `dim`, each of which is cut, as the halves of a gated layer.
        """
        seed, size = next_seed(), weight.size(dim) // pieces
        for piece, block in enumerate(weight.detach().split(size, dim)):
            start = (piece * ranks + rank) * size
            fill(block, self.std, seed, **{("row", "column")[dim]: start})


def next_seed() -> int:
    """Return a seed from torch's CPU generator, which advances by one number."""
    return int(torch.empty((), dtype=torch.int64).random_())


def fill(block: torch.Tensor, std: float, seed: int, row: int = 0, column: int = 0) -> None:
    """Fill a block of a weight with its numbers.

    Args:
        block: [rows, columns], of any type, strides and device.
        std: standard deviation.
        seed: seed of the weight, at least 0 and below 2^63.
        row: first row of the block in the weight.
        column: first column of the block in the weight.
    """
    rows, columns = block.shape
    strips = range(column // _STRIP, -(-(column + columns) // _STRIP))
    streams = [numpy.random.Philox(key=seed, counter=[row * _BLOCKS, strip, 0, 0]) for strip in strips]
    for begin in range(0, rows, _ROWS):
        some = block[begin : begin + _ROWS]
        for strip, stream in zip(strips, streams, strict=True):
            left = strip * _STRIP - column
            first, last = max(left, 0), min(left + _STRIP, columns)
            numbers = _normal(stream, len(some) * _STRIP, std).reshape(-1, _STRIP)
            some[:, first:last].copy_(torch.from_numpy(numbers[:, first - left : last - left]))


def _normal(stream: Any, count: int, std: float) -> numpy.ndarray:
    """Return the next numbers of a stream, [count] in float32; `count` is even. One of 32 bits is the sign. The others
    are, as a float, 2^32 times the probability of a number further from 0. Its exponent and the first bits of its
    mantissa select a place in the table. The last bits interpolate to the next place."""
    values, slopes = _table()
    random = stream.random_raw(count // 2).astype("<u8", copy=False).view("<i4")
    bits = random & 0x7FFFFFFF
    bits |= 1
    bits = bits.astype(numpy.float32).view(numpy.int32)
    places = numpy.right_shift(bits, _MANTISSA, dtype=numpy.intp)
    places -= _ONE
    bits &= (1 << _MANTISSA) - 1
    numbers = bits.astype(numpy.float32)
    numbers *= slopes.take(places)
    numbers += values.take(places)
    numbers *= numpy.float32(std)
    random &= -0x80000000
    signed = numbers.view(numpy.int32)
    signed |= random
    return numbers


@cache
def _table() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return (value at each place, its change per step of the mantissa's last bits), for floats of 1 to 2^31."""
    places = 31 * _PLACES
    floats = [2.0 ** (place // _PLACES) * (1 + place % _PLACES / _PLACES) for place in range(places + 1)]
    values = numpy.array([-NormalDist().inv_cdf(value / 2**32) for value in floats])
    slopes = numpy.append(numpy.diff(values), 0.0) / (1 << _MANTISSA)
    return values.astype(numpy.float32), slopes.astype(numpy.float32)


def bare_layer(kind: type, *sizes: int, **options: Any) -> Any:
    """Return a linear layer or convolution of torch with uninitialized memory, for `draw_weights`."""
    return skip_init(kind, *sizes, **options)


def draw_weights(layer: Any, std: float, config: TransformerConfig) -> None:
    """Draw weights from a normal distribution and set biases to 0; do nothing without
    `config.perform_initialization`."""
    if config.perform_initialization:
        Normal(std)(layer.weight)
        if layer.bias is not None:
            torch.nn.init.zeros_(layer.bias)


def drawn(shape: tuple[int, ...], std: float, config: TransformerConfig) -> torch.nn.Parameter:
    """Return a parameter of a normal distribution; uninitialized without `config.perform_initialization`."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    if config.perform_initialization:
        Normal(std)(parameter)
    return parameter
