"""RMSNorm in fp32 on a CPU, with a backward pass of its own.

Torch 2.11 has no kernel there: it composes the norm of seven operations, and the backward pass of what each of them
has, in twenty passes over the hidden states: 2 % of a step of a small language model. The pass forward has torch's
numbers.

Shape suffixes: H hidden size, T all other dimensions as one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class RMSNorm(torch.nn.RMSNorm):
    """As torch's, by `rms_norm`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., H], normalised over the last dimension."""
        return rms_norm(inputs, self.weight, self.eps)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """inputs / rms(inputs) * weight, over the last dimension.

    Args:
        inputs: [..., H].
        weight: [H].
        eps: added to the mean of squares; None: the smallest number of the type of `inputs`.
    """
    is_own = (
        torch.is_grad_enabled()
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and eps is not None
        and not torch.compiler.is_compiling()
    )
    return _RMSNorm.apply(inputs, weight, eps) if is_own else F.rms_norm(inputs, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        scale = inputs.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = inputs * scale
        ctx.save_for_backward(normed, scale, weight_H)
        return normed * weight_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale, weight_H = ctx.saved_tensors
        (gradient,) = gradients
        to_inputs, to_weight, _ = ctx.needs_input_grad
        each_TH = (gradient * normed).reshape(-1, len(weight_H))
        back = None
        if to_inputs:
            # What changes the length of a row alone is taken away.
            along = torch.mv(each_TH, weight_H).view_as(scale).div_(-len(weight_H))
            back = (gradient * weight_H).addcmul_(normed, along).mul_(scale)
        return back, each_TH.sum(0) if to_weight else None, None
