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
    if _is_in_place(weight):
        return _Linear.apply(inputs, 1, weight, bias)
    return F.linear(inputs, weight, bias)


def linear_halves(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `linear`, what the first and the second half of the weight's rows give. Where the weight is summed in place
    each is a tensor of its own, and their gradients are never put together."""
    if _is_in_place(weight):
        return _Linear.apply(inputs, 2, weight, bias)
    first, second = F.linear(inputs, weight, bias).chunk(2, dim=-1)
    return first, second


def _is_in_place(weight: torch.Tensor) -> bool:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    gradient = weight.grad
    # A hook of the weight wants its gradient by itself, and one that is frozen by now has none.
    is_reduced = gradient is not None and gradient is getattr(weight, "main_grad", None)
    return is_reduced and weight.requires_grad and not weight._backward_hooks


class _Linear(torch.autograd.Function):
    """The products of inputs with equal parts of a weight's rows."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, parts: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        ctx.save_for_backward(inputs, weight)
        ctx.parameter = weight  # what is saved comes back as another tensor, without a gradient, where it is recomputed
        if parts == 1:
            return F.linear(inputs, weight, bias)
        biases = (None,) * parts if bias is None else bias.chunk(parts)
        return tuple(F.linear(inputs, *part) for part in zip(weight.chunk(parts), biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs, _, _, to_bias = ctx.needs_input_grad
        flat = inputs.reshape(-1, inputs.shape[-1])
        parts = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        for rows, sums in zip(parts, ctx.parameter.grad.chunk(len(parts)), strict=True):
            sums.addmm_(rows.t(), flat)
        back = None
        if to_inputs:
            first, *others = zip(parts, weight.chunk(len(parts)), strict=True)
            back = torch.mm(*first)
            for other in others:
                back.addmm_(*other)
            back = back.view_as(inputs)
        return back, None, None, torch.cat([rows.sum(0) for rows in parts]) if to_bias else None
