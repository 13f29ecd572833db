"""RMSNorm as CUDA's kernel has it, which keeps its input: on meta tensors torch 2.11 computes it operation by operation
and keeps copies in fp32 that no GPU has."""

from typing import Any

import torch


class RmsNorm(torch.autograd.Function):
    """Tensors of the shapes and types of `aten::_fused_rms_norm` on CUDA and of its backward pass, without values."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`inputs` [..., hidden size], `weight` [hidden size]."""
        rstd = inputs.new_empty((*inputs.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, rstd)
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of the inputs and of the weight, where they are asked for."""
        inputs, weight, _ = ctx.saved_tensors
        of_inputs, of_weight = ctx.needs_input_grad
        return torch.empty_like(inputs) if of_inputs else None, torch.empty_like(weight) if of_weight else None
