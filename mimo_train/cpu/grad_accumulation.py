"""Gradient accumulation in the buffer that ranks reduce. Megatron-Core 0.19.2 adds each gradient to the buffer in a
hook (distributed_data_parallel.py:475). On a CPU, where weights and buffer have one type and the reduction waits for
the last microbatch, autograd adds to the buffer itself."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


class InPlaceGradients(DistributedDataParallel):
    """Megatron-Core's wrapper, in which the `grad` of a parameter that `sums_in_place` is its part of the buffer."""

    def zero_grad_buffer(self) -> None:
        """Start a step. An optimizer that removes gradients of parameters must do so before."""
        super().zero_grad_buffer()
        for parameter in self.params_with_grad:
            if self.sums_in_place(parameter):
                parameter.grad = _buffer_part(parameter)

    def sums_in_place(self, parameter: torch.nn.Parameter) -> bool:
        """True if autograd adds this parameter's gradient to the buffer."""
        return (
            not self.ddp_config.overlap_grad_reduce
            # Matmuls add to the buffer, and return gradients of any values.
            and not self.config.gradient_accumulation_fusion
            and parameter.device.type == "cpu"
            and parameter.dtype == _buffer_part(parameter).dtype
        )

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        original = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            # The optimizer or user code may have removed the gradient.
            if param.grad is None or param.grad is not _buffer_part(param):
                original(*unused)

        return hook


def _buffer_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.main_grad  # type: ignore[attr-defined]  # Megatron-Core's
