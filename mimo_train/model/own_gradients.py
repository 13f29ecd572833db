"""Gradients are summed where ranks reduce them.

Megatron-Core's DistributedDataParallel has each gradient written to memory of its own, and adds it, in a hook of every
parameter, to the buffer that is reduced (Megatron-Core 0.19.2, distributed_data_parallel.py:475). On the CPU, where
weights and buffer are of one type and the reduction waits for the last microbatch, autograd adds to the buffer itself,
and a product that is the gradient of a weight is written there at once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel


class OwnGradients(DistributedDataParallel):
    """As Megatron-Core's; of parameters that `sums_in_place`, the `grad` is the part of the buffer."""

    def zero_grad_buffer(self) -> None:
        """Start a step. An optimizer that removes gradients of parameters does so before."""
        super().zero_grad_buffer()
        for parameter in self.params_with_grad:
            if self.sums_in_place(parameter):
                parameter.grad = _reduced(parameter)

    def sums_in_place(self, parameter: torch.nn.Parameter) -> bool:
        """Whether autograd adds to what is reduced."""
        return (
            not self.ddp_config.overlap_grad_reduce
            and parameter.device.type == "cpu"
            and parameter.dtype == _reduced(parameter).dtype
        )

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        original = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            # The gradient is missing where the optimizer, or someone else, has removed it.
            if param.grad is None or param.grad is not _reduced(param):
                original(*unused)

        return hook


def _reduced(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The part of the buffer that has a parameter's gradient."""
    return parameter.main_grad  # type: ignore[attr-defined]  # Megatron-Core's


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear`, whose backward pass adds to the gradient of a weight that is summed in place. In a
    compiled graph, which has no memory of its own to write to, autograd adds it."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _is_in_place(weight):
        return _Linear.apply(inputs, weight, bias)
    return F.linear(inputs, weight, bias)


def _is_in_place(weight: torch.Tensor) -> bool:
    gradient = weight.grad
    # A hook of the weight wants its gradient by itself, and one that is frozen by now has none.
    is_reduced = gradient is not None and gradient is getattr(weight, "main_grad", None)
    return is_reduced and weight.requires_grad and not weight._backward_hooks


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        weight.grad.addmm_(rows.t(), inputs.reshape(-1, inputs.shape[-1]))
        to_inputs, _, to_bias = ctx.needs_input_grad
        return gradient.matmul(weight) if to_inputs else None, None, rows.sum(0) if to_bias else None
