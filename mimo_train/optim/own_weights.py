"""Weights of fp32 are updated where the model reads them.

Megatron-Core's distributed optimizer updates a rank's shards of the weights and copies them into the buffer that it
gathers from. Of fp32 weights the shards are parts of that very buffer, and it copies each onto itself (Megatron-Core
0.19.2, distrib_optimizer.py:2852): as many bytes read and written as the model has, in every step.
"""

from collections.abc import Iterable

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def leave_own_weights(optimizers: Iterable[MegatronOptimizer]) -> None:
    """Copy nothing in those optimizers whose shards are all parts of the model's buffers."""
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer) and has_own_weights(optimizer):
            optimizer._copy_main_params_to_model_params = lambda: None


def has_own_weights(optimizer: DistributedOptimizer) -> bool:
    """Whether every shard that is updated is where the model's weights are."""
    if optimizer.is_stub_optimizer or any(optimizer.shard_fp32_from_float16_groups):
        return False
    pairs = zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True)
    return all(
        shard.data_ptr() == _place(optimizer, parameter).data_ptr()
        for shards, parameters in pairs
        for shard, parameter in zip(shards, parameters, strict=True)
    )


def _place(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Where a copy of this rank's part of a parameter would go."""
    buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
    part = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    return optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[part.start : part.end]
