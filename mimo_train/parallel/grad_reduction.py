"""Reduction of an encoder's gradients during its last backward pass of a step.

Megatron-Core 0.19.2 starts to reduce a bucket when its parameters have as many gradients as in the first step
(param_and_grad_buffer.py:926-941), in any order of buckets, and stops at a bucket without them (:870). An encoder gets
no gradient on a rank whose last microbatch has no media. Here ranks reduce buckets in one order, as torch's DDP does
(Li et al. 2020): a bucket waits for those before it, and the end of the step reduces the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from mimo_train.config.errors import UserError


class InOrderReduction(DistributedDataParallel):
    """Megatron-Core's wrapper with `overlap_grad_reduce`, for a module that may lack gradients on some ranks.

    Each rank learns how many gradients a parameter gets in a microbatch from the first step in which all parameters of
    its bucket get one. Megatron-Core's wrapper believes that every step is the first: it counts gradients, starts no
    reduction during backward, and starts the remaining ones at the end.
    """

    _started = 0
    """Bucket groups whose reduction has started in this step."""

    def zero_grad_buffer(self) -> None:
        """Start a step."""
        self._started = 0
        for group in self._all_bucket_groups:
            counts, group.per_param_grad_ready_counts = group.per_param_grad_ready_counts, {}
            if not group.golden_per_param_grad_ready_counts and len(counts) == len(group.params):
                group.golden_per_param_grad_ready_counts = counts
        super().zero_grad_buffer()

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        add = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            group = self.param_to_bucket_group[param]
            if group.grad_reduce_handle is not None:
                raise UserError(
                    f"optim.overlap_grad_reduce: a parameter of shape {[*param.shape]} got "
                    f"{group.per_param_grad_ready_counts[param] + 1} gradients in a microbatch, and "
                    f"{group.golden_per_param_grad_ready_counts[param]} in an earlier step. Set it to false"
                )
            if param.grad is None:  # a fused matmul added it to the buffer, or the output does not depend on it
                group.register_grad_ready(param)
            else:
                add(*unused)
            self._start_ready_groups()

        return hook

    def _start_ready_groups(self) -> None:
        for group in self._all_bucket_groups[self._started :]:
            expected = group.golden_per_param_grad_ready_counts
            if not expected or group.per_param_grad_ready_counts != expected:
                return
            group.start_grad_sync(self.force_all_reduce)
            self._started += 1

    @property
    def _all_bucket_groups(self) -> list[Any]:
        """The bucket groups in the order in which the end of a step reduces them."""
        return self.bucket_groups + self.expert_parallel_bucket_groups
