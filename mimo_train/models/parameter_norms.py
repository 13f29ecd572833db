"""L2 norms of parameters and gradients, over all modules, at any layout: every element counts once.

An element is replicated on tensor-parallel ranks if its parameter is not cut, on data-parallel ranks (for experts, on
the expert's replicas), and for tied embeddings on the first and the last stage. Ranks decide locally which of them
counts it. One message sums the squares over the world.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import MegatronModule, param_is_not_shared
from megatron.core.utils import unwrap_model

from mimo_train.cpu.kernels import norm_blocks
from mimo_train.models.parameters import global_names, modules_of
from mimo_train.models.sharding import ShardedModule
from mimo_train.parallel import device

PREFIX = "l2_norm/grad"
"""Prefix of the names of gradient norms."""


def params_l2_norm(model: list[MegatronModule], master_copies: bool = True) -> float:
    """Return the L2 norm of all parameters of all modules, frozen ones included.

    Collective over the world: one sum, and one copy to the host.

    Args:
        model: the model chunks of this rank, as `mimo_train.models.build.build_model` returns them.
        master_copies: count 16-bit parameters by the optimizer's fp32 master copies if there are any, also if each
            data-parallel rank keeps a part of them (`main_param`, `main_param_sharded`).
    """
    pieces = []
    for chunk in (chunk for chunks in modules_of(model).values() for chunk in chunks):
        for _, param, shard in _counted(chunk):
            if shard is None or not param.is_floating_point():  # a quantized weight
                continue
            if not master_copies or not hasattr(param, "main_param"):
                pieces.append(param.reshape(-1)[shard])
            elif not getattr(param, "main_param_sharded", False):
                pieces.append(param.main_param.reshape(-1)[shard])
            elif param.main_param is not None:
                pieces.append(param.main_param)
    total = squares_of(pieces).sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def grad_l2_norms(model: list[MegatronModule]) -> dict[str, float]:
    """Return L2 norms of the gradients: of all together and of every parameter.

    Collective over the world: one sum and one copy to the host, and at the first call an all-gather of names. Gradients
    are used in their current state, summed over ranks by `finalize_model_grads`: unclipped and with the fp16 loss scale
    before the optimizer's step, clipped and unscaled after it.

    Returns:
        The same on every rank: `l2_norm/grad/global`, and `l2_norm/grad/<module>.<parameter>` for every trained
        parameter. Names are the same at every layout (layers and experts have their number in the whole model), for
        example `l2_norm/grad/language.decoder.layers.3.mlp.linear_fc1.weight`.
    """
    grads: dict[str, torch.Tensor | None] = {}
    for module, chunk in ((module, chunk) for module, chunks in modules_of(model).items() for chunk in chunks):
        for name, param, piece in _counted(chunk):
            if not param_is_not_shared(param):
                continue
            grad = getattr(param, "main_grad", param.grad) if param.requires_grad and piece is not None else None
            grads[f"{module}.{name}"] = None if grad is None else grad.reshape(-1)[piece]
    if not hasattr(model[0], "names_of_all_ranks"):  # gathered once, in rank order without duplicates
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, list(grads))
        model[0].names_of_all_ranks = list(dict.fromkeys(name for names in gathered for name in names))
    names = model[0].names_of_all_ranks
    index = {name: number for number, name in enumerate(names)}
    local_grads = {name: piece for name, piece in grads.items() if piece is not None}
    rows = torch.tensor([index[name] for name in local_grads], dtype=torch.long)
    squares_and_counts = torch.zeros(2, len(names), dtype=torch.float64, device=device.current())
    squares_and_counts[0, rows] = squares_of(list(local_grads.values()))
    squares_and_counts[1, rows] = 1.0
    dist.all_reduce(squares_and_counts)
    squares, counts = squares_and_counts.tolist()
    norms = {f"{PREFIX}/global": sum(squares) ** 0.5}
    return norms | {f"{PREFIX}/{name}": squares[row] ** 0.5 for name, row in index.items() if counts[row]}


def _counted(chunk: MegatronModule) -> Iterator[tuple[str, torch.nn.Parameter, slice | None]]:
    """Yield (name in the whole model, parameter, flat elements that this rank counts or None)."""
    if isinstance(chunk, ShardedModule):
        for name, param in global_names(chunk).items():
            yield name, chunk.shards[param], slice(None)
        return
    slices, pgs = _slices(chunk), unwrap_model(chunk).pg_collection
    for name, param in global_names(chunk).items():
        is_expert = not getattr(param, "allreduce", True)
        replicas = pgs.expt_dp if is_expert else pgs.dp_cp
        shard = slices.get(param, slice(None) if replicas.rank() == 0 else None)
        if not param_is_not_shared(param) or not param_is_not_tensor_parallel_duplicate(param, pgs.tp, pgs.expt_tp):
            shard = None
        yield name, param, shard


def _slices(module: torch.nn.Module) -> dict[torch.nn.Parameter, slice]:
    """Return the flat part of every trained parameter that the optimizer of this data-parallel rank updates. Elsewhere
    gradients are incomplete after a reduce-scatter, and parameters are old before an all-gather."""
    slices: dict[torch.nn.Parameter, slice] = {}
    if not isinstance(module, DistributedDataParallel):
        return slices
    for buffer in module.buffers + module.expert_parallel_buffers:
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            length = bucket.grad_data.numel()
            first, end = length * rank // size, length * (rank + 1) // size
            for param, (start, stop) in bucket.param_to_index.items():
                slices[param] = slice(max(first - start, 0), max(min(end, stop) - start, 0))
    return slices


def squares_of(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each tensor, float64 on the device."""
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device=device.current())
    blocks = [norm_blocks(piece.detach().reshape(-1)) for piece in pieces]
    norms = torch._foreach_norm([block for each in blocks for block in each], dtype=torch.float32)
    squares = torch.stack(norms).double().square()
    return torch.stack([part.sum() for part in squares.split([len(each) for each in blocks])])
