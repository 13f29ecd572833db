"""Checkpoints of optimizers whose whole state is on every replica (`optim.distributed_optimizer: false`).

Megatron-Core 0.19.2's FP32Optimizer and Float16OptimizerWithFloat16Params write names of their own (optimizer.py:1196,
:1090), which its distributed optimizer does not read, and leave step and parameter groups to the common state, which
global rank 0 alone saves: a rank of an encoder. Here they write and read what the distributed optimizer does in its
format `fully_reshardable` (distrib_optimizer.py:1690), so that a run continues with the key switched either way.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.optimizer import MegatronOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of Adam for a parameter."""


def store_like_distributed(optimizer: MegatronOptimizer) -> None:
    """Let a non-distributed optimizer of Megatron-Core read and write checkpoints of the distributed one."""
    optimizer.sharded_state_dict = partial(_sharded_state, optimizer)
    optimizer.load_state_dict = partial(_load_state, optimizer)


def _sharded_state(
    optimizer: MegatronOptimizer, model_state: dict, is_loading: bool = False, metadata: dict | None = None
) -> dict[str, Any]:
    """The state with its moments made (`init_state_fn`); cut as the parameters in `model_state` are."""
    if optimizer.is_stub_optimizer:
        return {}
    places, _ = extract_sharded_tensors_and_factories(model_state)
    # Tied embeddings may occur twice; a parameter has one state.
    by_parameter = {id(_main(place.data)): place for place in nested_values(places)}
    state = [
        {key: _placed(by_parameter[id(parameter)], key, tensor) for key, tensor in _tensors(optimizer, parameter)}
        for parameter in optimizer.get_parameters()
    ]
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": dict(enumerate(state)),
        "param_state_sharding_type": "fully_reshardable",
    }


def _load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Copy what was loaded into parameters and moments; settings of groups are the caller's matter."""
    if optimizer.is_stub_optimizer:
        return
    for index, parameter in enumerate(optimizer.get_parameters()):
        for key, tensor in _tensors(optimizer, parameter):
            tensor.copy_(state["param_state"][index][key])


def _main(parameter: torch.Tensor) -> torch.Tensor:
    """The fp32 master copy that the optimizer updates, or the parameter itself where that is fp32."""
    return getattr(parameter, "main_param", parameter)


def _tensors(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    moments = optimizer.optimizer.state[parameter]
    return [("param", parameter.detach()), *((key, moments[key]) for key in MOMENTS)]


def _placed(place: Any, key: str, tensor: torch.Tensor) -> Any:
    """`tensor` cut and named like its parameter, which `place` describes."""
    changes: dict[str, object] = {"key": f"optimizer.state.{key}.{place.key}", "data": tensor}
    if not isinstance(place, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    placed = replace(place, **changes)
    placed.validate_metadata_integrity()
    return placed
