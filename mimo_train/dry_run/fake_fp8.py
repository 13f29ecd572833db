"""Transformer Engine's fp8 for `fake_engine`: recipes, the context that switches it on, copies of weights. Numbers are
not rounded.

As the real one, it refuses sizes that its products do not take, and computes with the copy of a weight that it made
when it was last told that weights may have changed. The copy is of two bytes a number, which those by rows and by
columns are together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

Format = SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")


class _Recipe:
    unit = 16

    def __init__(self, *, fp8_format: str, **options: Any):
        assert not set(options) - {"fp8_dpa"} and not options.get("fp8_dpa"), options
        self.fp8_format = fp8_format


class Float8CurrentScaling(_Recipe):
    """`tensorwise`."""


class Float8BlockScaling(_Recipe):
    """`blockwise`."""

    def __init__(self, *, fp8_format: str):
        assert fp8_format == Format.E4M3
        super().__init__(fp8_format=fp8_format)


class MXFP8BlockScaling(_Recipe):
    """`mxfp8`."""

    unit = 32


_ACTIVE: list[_Recipe] = []


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: _Recipe | None = None, fp8_group: Any = None) -> Iterator[None]:
    """Products of layers are in fp8 inside of it."""
    assert enabled and fp8_recipe is not None, "Megatron-Core enters it for layers with fp8 alone"
    _ACTIVE.append(fp8_recipe)
    try:
        yield
    finally:
        _ACTIVE.pop()


def supported() -> tuple[bool, str]:
    """Of every recipe: the device is one that has it."""
    return True, ""


class _InItsPlace(torch.autograd.Function):
    """The value of one tensor, and the gradient to another of the same shape."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Fp8Weight:
    """The copy of a layer's weight in fp8."""

    def __init__(self) -> None:
        self.copy: torch.Tensor | None = None
        self.made = 0
        """How often it was made."""

    def of(self, weight: torch.Tensor, inputs: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """What the product of `inputs` [..., width] is computed with."""
        if not _ACTIVE:
            return weight
        rows, unit = inputs.shape[:-1].numel(), _ACTIVE[-1].unit
        # As `assert_dim_for_fp8_exec` of Transformer Engine, and multiples of 16 for the gradient of the weight, whose
        # sum is over rows (cublaslt_gemm.cu: "Leading dimension requirement").
        wrong = any(size % unit for size in (rows, *weight.shape))
        assert not wrong, f"fp8: {rows} rows, weight {tuple(weight.shape)}"
        if self.copy is None or is_first_microbatch is not False:
            self.copy, self.made = weight.detach().clone(), self.made + 1
        return _InItsPlace.apply(weight, self.copy)
