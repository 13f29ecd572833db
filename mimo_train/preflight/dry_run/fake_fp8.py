"""Transformer Engine's fp8 for `fake_engine`. As in the real package, sizes that its matmuls do not support are
rejected, and matmuls use the last copy of a weight. Values are not rounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

Format = SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")


class _Recipe:
    unit = 16

    def __init__(self, *, fp8_format: str, fp8_dpa: bool = False):
        assert not fp8_dpa, "attention in fp8"
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
    """Compute the matmuls of layers in fp8 inside the block."""
    assert enabled and fp8_recipe is not None, "Megatron-Core enters it for layers with fp8 alone"
    _ACTIVE.append(fp8_recipe)
    try:
        yield
    finally:
        _ACTIVE.pop()


def supported() -> tuple[bool, str]:
    """Return True: the device supports every recipe."""
    return True, ""


class Fp8Padding(torch.nn.Module):
    """`te.pytorch.Fp8Padding`: rows of zeros after those of each expert, up to a size that matmuls support."""

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        assert align_size is None, "Megatron-Core gives none to experts, nor do we"
        self.num_gemms = num_gemms

    def forward(self, inputs: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return (padded rows, number per expert) from `inputs` [rows, width], with `m_splits` rows per expert. As the
        real one, it also pads in layers that stay in bf16."""
        assert len(m_splits) == self.num_gemms
        padded = _padded(m_splits)
        parts = zip(inputs.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, after - before)) for part, before, after in parts]), padded


class Fp8Unpadding(Fp8Padding):
    """`te.pytorch.Fp8Unpadding`."""

    def forward(self, inputs: torch.Tensor, m_splits: list[int]) -> torch.Tensor:  # type: ignore[override]
        """Return `inputs` without the rows that `Fp8Padding` added; `m_splits` are those before padding."""
        parts = zip(inputs.split(_padded(m_splits)), m_splits, strict=True)
        return torch.cat([part[:rows] for part, rows in parts])


def _padded(m_splits: list[int]) -> list[int]:
    unit = _ACTIVE[-1].unit if _ACTIVE else _Recipe.unit
    return [-(-rows // unit) * unit for rows in m_splits]


class _CopyForWeight(torch.autograd.Function):
    """Returns the copy of a weight, and passes its gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Fp8Weight:
    """The fp8 copy of a layer's weight: two bytes a number, for rows and columns together. As in the real package, it
    is made when the caller says that weights may have changed; `made` counts the copies."""

    def __init__(self) -> None:
        self.copy: torch.Tensor | None = None
        self.made = 0

    def of(self, weight: torch.Tensor, inputs: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """Return the weight for the matmul of `inputs` [..., width]."""
        if not _ACTIVE:
            return weight
        rows, unit = inputs.shape[:-1].numel(), _ACTIVE[-1].unit
        # As `assert_dim_for_fp8_exec` of Transformer Engine, and multiples of 16 for the gradient of the weight,
        # which sums over rows (cublaslt_gemm.cu: "Leading dimension requirement").
        wrong = any(size % unit for size in (rows, *weight.shape))
        assert not wrong, f"fp8: {rows} rows, weight {tuple(weight.shape)}"
        if self.copy is None or is_first_microbatch is not False:
            self.copy, self.made = weight.detach().clone(), self.made + 1
        return _CopyForWeight.apply(weight, self.copy)
