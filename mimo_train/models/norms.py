"""Norms of layers, and additions to the residual stream that some families use instead of Megatron-Core's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.cpu import kernels
from mimo_train.models.parameters import CutOverHeads, mark

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""Output of attention or of a feed-forward block, and a bias that is still to be added."""
Add = Callable[[Branch, torch.Tensor, float], torch.Tensor]
"""A function that adds (branch, residual stream, probability of dropout)."""

_NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class TorchNorm:
    """A builder of torch's LayerNorm or RMSNorm, called where Megatron-Core builds a norm.

    Unlike `WrappedTorchNorm` it allows sequence parallelism: its parameters are marked, so that `finalize_model_grads`
    sums their gradients over the tensor-parallel ranks.
    """

    def __new__(  # type: ignore[misc]  # it builds a norm, and is none
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        cpu_kernels = getattr(config, "cpu_kernels", False)
        if config.layernorm_zero_centered_gamma:
            assert config.normalization == "RMSNorm", config.normalization
            norm: torch.nn.Module = ZeroCenteredRMSNorm(hidden_size, eps, config.params_dtype, cpu_kernels)
        else:
            norms = _NORMS | {"RMSNorm": kernels.RMSNorm} if cpu_kernels else _NORMS
            options = {} if getattr(config, "norm_bias", True) else {"bias": False}
            norm = norms[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype, **options)
        for parameter in norm.parameters():
            mark(parameter, sequence_parallel=config.sequence_parallel)
        return norm


def norm_class(te: bool) -> type:
    """Return the builder of a separate norm (final norms)."""
    if te:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return TorchNorm


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), in fp32. The parameter is the weight itself: adding and subtracting 1 would change its
    bits."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, cpu_kernels: bool = False):
        super().__init__()
        self._norm = kernels.rms_norm if cpu_kernels else _rms_norm
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype))
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden size] over the last dimension."""
        return self._norm(inputs.float(), 1 + self.weight.float(), self.eps).type_as(inputs)


def _rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(inputs, weight.shape, weight, eps)


class NormOverHeads(CutOverHeads, torch.nn.Module):
    """x / rms(x) * weight over the channels of all heads, of which each tensor-parallel rank has a part."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int):
        """`hidden_size`: of one of the model's `heads`."""
        super().__init__()
        self.width, self.eps = hidden_size * heads, eps
        part = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(part, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads_SBND: torch.Tensor) -> torch.Tensor:
        """Normalize the heads [S, B, N, D] of this rank."""
        heads = heads_SBND.float()
        squares = heads.square().sum((-2, -1), keepdim=True)
        # The sum is of all ranks, and so is its gradient.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = heads * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight.view(heads.shape[-2:]) * normed).type_as(heads_SBND)


class NormedAdd(torch.nn.Module):
    """residual + dropout(multiplier * norm(branch + bias)), where Megatron-Core adds a branch to the residual
    stream."""

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module], multiplier: float):
        """`norm` builds the norm, of the hidden size."""
        super().__init__()
        self._multiplier = multiplier
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the function that the layer calls; `fused` has no effect."""

        def add(branch: Branch, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = branch
            normed = self.norm(output if bias is None else output + bias)
            if self._multiplier != 1:
                normed = normed * self._multiplier
            return residual + F.dropout(normed, dropout, training)

        return add


class ScaledAdd(torch.nn.Module):
    """residual + dropout(scale * (branch + bias)), where Megatron-Core adds a branch to the residual stream.
    `config.layer_scale` is the initial scale of every channel."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        value = torch.full((config.hidden_size,), config.layer_scale, dtype=config.params_dtype)
        self.scale = torch.nn.Parameter(value)
        # Each rank sees its part of the tokens: `finalize_model_grads` then sums over the tensor-parallel ranks.
        mark(self.scale, sequence_parallel=config.sequence_parallel)

    def forward(self, training: bool, fused: bool) -> Add:
        """Return the function that the layer calls; `fused` has no effect."""

        def add(branch: Branch, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = branch
            scaled = (output if bias is None else output + bias) * self.scale
            return residual + F.dropout(scaled, dropout, training)

        return add
