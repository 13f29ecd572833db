"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): momentum, orthogonalised by matrix.

Every matrix is whole when it is orthogonalised: ranges of replicas and parts of tensor-parallel ranks are put together,
and fused weights are divided into their matrices, as Megatron-Core's `TensorParallelMuon` with `tp_mode=duplicated` and
`split_qkv` does, which needs a package for GPUs. So every layout gives the same update. Updates have the root mean
square of AdamW's (0.2 sqrt(max(rows, columns)); Liu et al., 2025, arXiv:2502.16982): both take one learning rate.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.config.schema_optim import MUON_ITERATIONS
from mimo_train.optim import moments
from mimo_train.optim.elementwise import EMA
from mimo_train.optim.moments import OFFLOAD, State
from mimo_train.optim.shards import Shard, exchange, gradient_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration."""

_RMS = 0.2
"""Root mean square of the updates of AdamW in practice."""


def muon(
    group: dict[str, Any],
    parameters: dict[int, torch.Tensor],
    states: dict[int, State],
    shards: Sequence[Shard],
    factor: float,
) -> None:
    """Update matrices by Muon with Nesterov momentum. Collective over the replicas, and over tensor-parallel ranks.

    Args:
        parameters: tensors of this rank, fp32, with gradients, by id of the model's parameter.
        states: by id of the model's parameter.
        shards: all shards of the group, in the same order on each replica.
        factor: gradients are multiplied by it.
    """
    momentum, directions = group["momentum"], {}
    for number, parameter in parameters.items():
        kept = {name: value for name, value in states[number].items() if name != EMA}
        with moments.on_device([kept], parameter.device, offloaded=group.get(OFFLOAD, False)) as (state,):
            average, gradient = moments.read(state, "exp_avg").view_as(parameter), gradient_of(parameter) * factor
            average.lerp_(gradient, 1 - momentum)
            moments.write(state, "exp_avg", average)
            directions[number] = gradient.lerp_(average, momentum).view(-1)
    for shard, matrix in exchange(shards, directions):
        update = _update(matrix, shard).reshape(-1)[shard.start : shard.stop]
        parameter = parameters[id(shard.parameter)]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.view_as(parameter), alpha=-group["lr"])


def _update(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the update of this rank's part [rows, columns] of a weight."""
    if not shard.sections:
        return _orthogonal_part(matrix, shard)
    if len(matrix) % sum(shard.sections):  # tensor-parallel ranks share a group of heads
        complete = _by_section(_gathered(matrix, shard), shard.sections, partial(orthogonalised, dtype=_dtype(shard)))
        return _own_part(complete, shard)
    return _by_section(matrix, shard.sections, partial(_orthogonal_part, shard=shard))


def _by_section(
    matrix: torch.Tensor, sections: Sequence[int], update: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the updates of the matrices that a fused one repeats, fused again."""
    repeated = matrix.view(-1, sum(sections), matrix.shape[1])
    parts = repeated.split(list(sections), dim=1)
    updates = [update(part.reshape(-1, matrix.shape[1])).reshape(part.shape) for part in parts]
    return torch.cat(updates, dim=1).reshape(matrix.shape)


def _orthogonal_part(part: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return this rank's part of the orthogonalised matrix that tensor-parallel ranks have parts of."""
    if shard.cut is None:
        return orthogonalised(part, _dtype(shard))
    return _own_part(orthogonalised(_gathered(part, shard), _dtype(shard)), shard)


def _dtype(shard: Shard) -> torch.dtype:
    """Return the type of the iteration."""
    return torch.float32 if shard.parameter.dtype == torch.float32 else torch.bfloat16


def _gathered(part: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the matrix that tensor-parallel ranks have parts of."""
    parts = [torch.empty_like(part) for _ in range(shard.tensor_parallel.size())]
    dist.all_gather(parts, part.contiguous(), group=shard.tensor_parallel)
    return torch.cat(parts, dim=shard.cut or 0)


def _own_part(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return this rank's part of a matrix that tensor parallelism cuts."""
    return matrix.chunk(shard.tensor_parallel.size(), dim=shard.cut or 0)[shard.tensor_parallel.rank()]


def orthogonalised(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scaled orthogonal factor of a matrix, fp32; `dtype`: of the iteration."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = (matrix.mT if rows > columns else matrix).to(dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if rows > columns else x).float() * (_RMS * max(rows, columns) ** 0.5)
