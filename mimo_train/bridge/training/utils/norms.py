"""L2 norms with the names and signatures of Megatron-Bridge."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule, param_is_not_shared
from torch.distributed.tensor import DTensor

from mimo_train.config.errors import UserError
from mimo_train.models.parameter_norms import grad_l2_norms, params_l2_norm, squares_of

__all__ = ["calc_dtensor_params_l2_norm", "calc_params_l2_norm", "param_is_not_shared", "report_l2_norm_grad"]


def calc_params_l2_norm(
    model: MegatronModule | list[MegatronModule],
    model_config: Any,
    use_megatron_fsdp: bool = False,
    force_create_fp32_copy: bool = False,
) -> float:
    """Return the L2 norm of all parameters of all modules, frozen ones included. Collective over the world.

    Args:
        model: the model chunks of this rank.
        model_config: unused: the parameters carry the needed attributes.
        use_megatron_fsdp: all parameters are DTensors.
        force_create_fp32_copy: use 16-bit parameters themselves, in fp32, instead of their master copies.

    Raises:
        UserError: `use_megatron_fsdp`, and a parameter is not a DTensor.
    """
    chunks = model if isinstance(model, list) else [model]
    if use_megatron_fsdp:
        return calc_dtensor_params_l2_norm([param for chunk in chunks for param in chunk.parameters()])
    return params_l2_norm(chunks, master_copies=not force_create_fp32_copy)


def report_l2_norm_grad(model: MegatronModule | list[MegatronModule]) -> dict[str, float]:
    """Return the L2 norms of gradients; see `mimo_train.models.parameter_norms.grad_l2_norms`."""
    return grad_l2_norms(model if isinstance(model, list) else [model])


def calc_dtensor_params_l2_norm(params: Iterable[DTensor]) -> float:
    """Return the L2 norm of DTensors that are sharded or replicated over their device meshes. Collective over the
    meshes.

    Args:
        params: the same DTensors, in the same order, on every rank of a mesh.

    Raises:
        UserError: a parameter is not a DTensor, or holds incomplete sums (placement `Partial`).
    """
    by_spec: dict[tuple, list[torch.Tensor]] = {}
    for param in params:
        if not isinstance(param, DTensor):
            raise UserError(f"a norm over DTensors was asked for, and a parameter is a {type(param).__name__}")
        if any(placement.is_partial() for placement in param.placements):
            raise UserError(f"a norm needs cut or replicated DTensors, and one has placements {param.placements}")
        by_spec.setdefault((param.device_mesh, param.placements), []).append(param.to_local())
    total = 0.0
    for (mesh, placements), pieces in by_spec.items():
        square = squares_of(pieces).sum()
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(axis))
        total += square.item()
    return total**0.5
