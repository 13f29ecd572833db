"""Norms that some families have: with weights around zero, and behind attention and the feed-forward block."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.cpu import kernels


class ZeroCenteredRMSNorm(torch.nn.Module):
    """x / rms(x) * (1 + weight), in fp32. The parameter is the weight itself: adding 1 to it and taking it away again
    would change its bits."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, cpu_kernels: bool = False):
        super().__init__()
        self._norm = kernels.rms_norm if cpu_kernels else _rms_norm
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype))
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., hidden size], normalised over the last dimension."""
        return self._norm(inputs.float(), 1 + self.weight.float(), self.eps).type_as(inputs)


def _rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(inputs, weight.shape, weight, eps)


class NormedAdd(torch.nn.Module):
    """Adds the normalised output of attention or of the feed-forward block to the residual stream, where
    Megatron-Core's layer has bias, dropout and addition."""

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module]):
        """`norm` builds the norm, of the hidden size."""
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The function ((output, bias), residual, dropout) -> sum that the layer calls; `fused` is without effect."""

        def add(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            output = self.norm(output if bias is None else output + bias)
            return residual + F.dropout(output, dropout, training)

        return add
