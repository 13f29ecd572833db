"""A learned scale behind each branch of a layer (Touvron et al. 2021, arXiv 2103.17239, section 2)."""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.models.marks import mark

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""Output of attention or feed-forward block, and a bias that is still to be added."""
Added = Callable[[Branch, torch.Tensor, float], torch.Tensor]


class ScaledAdd(torch.nn.Module):
    """residual + dropout(scale * (branch + bias)), where Megatron-Core adds a branch to the residual stream.

    `config.layer_scale` is the scale in the beginning, the same for every channel.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        value = torch.full((config.hidden_size,), config.layer_scale, dtype=config.params_dtype)
        self.scale = torch.nn.Parameter(value)
        # Each rank sees its part of the tokens: `finalize_model_grads` then sums over the tensor-parallel ranks.
        mark(self.scale, sequence_parallel=config.sequence_parallel)

    def forward(self, training: bool, fused: bool) -> Added:
        """The function that adds (branch, bias) to the residual stream with this probability of dropout."""

        def add(branch: Branch, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = branch
            scaled = (output if bias is None else output + bias) * self.scale
            return residual + torch.nn.functional.dropout(scaled, dropout, training)

        return add
