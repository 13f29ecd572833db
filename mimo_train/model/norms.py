"""L2 norms of parameters and gradients, over all modules, at any layout: every element counts once.

An element stands on several ranks: on the tensor-parallel ones if its parameter is not cut, on the data-parallel ones
(for experts, on those of the expert's replicas), and tied embeddings on the first and the last stage. Which of them
counts it is decided without a message; what is counted is then summed over the world, in one message.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import MegatronModule, param_is_not_shared
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.tensor import DTensor

from mimo_train.config.schema import LANGUAGE

__all__ = ["calc_dtensor_params_l2_norm", "calc_params_l2_norm", "param_is_not_shared", "report_l2_norm_grad"]

PREFIX = "l2_norm/grad"
"""First part of the names of gradient norms."""


def calc_params_l2_norm(
    model: MegatronModule | list[MegatronModule],
    model_config: Any,
    use_megatron_fsdp: bool = False,
    force_create_fp32_copy: bool = False,
) -> float:
    """L2 norm of all parameters of all modules, frozen ones included. Collective over the world: one sum, and one copy
    to the host.

    Parameters of 16 bits count by their fp32 master copies where the optimizer keeps some, also where each
    data-parallel rank keeps a part of them (`main_param`, `main_param_sharded`).

    Args:
        model: the model chunks of this rank, as `mimo_train.model.build.build_model` returns them.
        model_config: not read; what a norm needs of it, the parameters know.
        use_megatron_fsdp: whether all parameters are DTensors.
        force_create_fp32_copy: count 16-bit parameters themselves, in fp32, and not their master copies.

    Raises:
        ValueError: `use_megatron_fsdp`, and a parameter is not a DTensor.
    """
    if use_megatron_fsdp:
        return calc_dtensor_params_l2_norm([param for chunk in _chunks(model) for param in chunk.parameters()])
    pieces = []
    for _, module in _modules(model):
        for _, param, own in _counted(module):
            if own is None:
                continue
            if force_create_fp32_copy or not hasattr(param, "main_param"):
                pieces.append(param.reshape(-1)[own])
            elif not getattr(param, "main_param_sharded", False):
                pieces.append(param.main_param.reshape(-1)[own])
            elif param.main_param is not None:
                pieces.append(param.main_param)
    total = _squares(pieces).sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def calc_dtensor_params_l2_norm(params: Iterable[DTensor]) -> float:
    """L2 norm of DTensors that are cut or replicated over their device meshes. Collective over the meshes.

    Args:
        params: the same DTensors, in the same order, on every rank of a mesh.

    Raises:
        ValueError: a parameter is no DTensor, or holds sums that are not complete (placement `Partial`).
    """
    by_spec: dict[tuple, list[torch.Tensor]] = {}
    for param in params:
        if not isinstance(param, DTensor):
            raise ValueError(f"a norm over DTensors was asked for, and a parameter is a {type(param).__name__}")
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(f"a norm needs cut or replicated DTensors, and one has placements {param.placements}")
        by_spec.setdefault((param.device_mesh, param.placements), []).append(param.to_local())
    total = 0.0
    for (mesh, placements), pieces in by_spec.items():
        square = _squares(pieces).sum()
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(axis))
        total += square.item()
    return total**0.5


def report_l2_norm_grad(model: MegatronModule | list[MegatronModule]) -> dict[str, float]:
    """L2 norms of the gradients, of all together and of every parameter. Collective over the world: one sum and one
    copy to the host, and at the first call a gathering of names.

    Gradients are taken as they stand, summed over ranks by `finalize_model_grads`. Before the optimizer's step that is
    before clipping, and in fp16 with the loss scale still in them; after it, clipped and unscaled.

    Returns:
        On every rank the same: `l2_norm/grad/global`, and `l2_norm/grad/<module>.<parameter>` for every parameter that
        is trained, by the same name at every layout (layers and experts have their number in the whole model), for
        example `l2_norm/grad/language.decoder.layers.3.mlp.linear_fc1.weight`.
    """
    own: dict[str, torch.Tensor | None] = {}
    for module_name, module in _modules(model):
        for name, param, piece in _counted(module):
            if not param_is_not_shared(param):
                continue
            grad = getattr(param, "main_grad", param.grad) if param.requires_grad and piece is not None else None
            own[f"{module_name}.{name}"] = None if grad is None else grad.reshape(-1)[piece]
    names = _names_of_all_ranks(_chunks(model)[0], list(own))
    index = {name: number for number, name in enumerate(names)}
    here = [name for name, piece in own.items() if piece is not None]
    rows = torch.tensor([index[name] for name in here], dtype=torch.long)
    squares_and_counts = torch.zeros(2, len(names), dtype=torch.float64, device=_device())
    squares_and_counts[0, rows] = _squares([own[name] for name in here])
    squares_and_counts[1, rows] = 1.0
    dist.all_reduce(squares_and_counts)
    squares, counts = squares_and_counts.tolist()
    norms = {f"{PREFIX}/global": sum(squares) ** 0.5}
    return norms | {f"{PREFIX}/{name}": squares[row] ** 0.5 for name, row in index.items() if counts[row]}


def _chunks(model: MegatronModule | list[MegatronModule]) -> list[MegatronModule]:
    return model if isinstance(model, list) else [model]


def _modules(model: MegatronModule | list[MegatronModule]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Name and model of every module on this rank, wrapped for data parallelism or not; chunk by chunk."""
    for chunk in _chunks(model):
        parts = [(path, part) for path, part in chunk.named_modules() if isinstance(part, DistributedDataParallel)]
        if not parts and any(True for _ in chunk.parameters()):
            parts = [("", chunk)]
        for path, part in parts:
            name = path.rpartition(".")[2]
            # A MimoModel calls it language_model; a plain GPT is the chunk itself.
            yield (LANGUAGE if name in ("", "language_model") else name), part


def _counted(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, slice | None]]:
    """Every parameter by its name in the whole model, with the elements of it, laid flat, that this rank counts; None:
    none of them."""
    slices = _slices(module)
    inner = get_attr_wrapped_model(module, "pg_collection", return_model_obj=True)
    pgs = inner.pg_collection
    for name, param in inner.named_parameters():
        is_expert = not getattr(param, "allreduce", True)
        replicas = pgs.expt_dp if is_expert else pgs.dp_cp
        own = slices.get(param, slice(None) if replicas.rank() == 0 else None)
        if not param_is_not_shared(param) or not param_is_not_tensor_parallel_duplicate(param, pgs.tp, pgs.expt_tp):
            own = None
        yield _global_name(inner, name), param, own


def _slices(module: torch.nn.Module) -> dict[torch.nn.Parameter, slice]:
    """The part of every trained parameter, laid flat, that the optimizer of this data-parallel rank updates.

    Only there are gradients complete after a reduce-scatter, and parameters new before they have been gathered.
    """
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


_EXPERT_NUMBER = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\bweight)\d+$|(?<=\bbias)\d+$")
"""Where a parameter's name has the number of its expert: `local_experts.3.linear_fc1.weight`, `linear_fc1.weight3`."""


def _global_name(module: torch.nn.Module, name: str) -> str:
    """The name of a parameter with layers and experts numbered over all stages and expert-parallel ranks."""
    parts, first_expert = name.split("."), 0
    for number, part in enumerate(parts):
        if hasattr(module, "ep_group") and hasattr(module, "num_local_experts"):
            first_expert = module.ep_group.rank() * module.num_local_experts
        module = getattr(module, part)
        if part.isdigit() and hasattr(module, "layer_number"):
            parts[number] = str(module.layer_number - 1)
    return _EXPERT_NUMBER.sub(lambda found: str(int(found[0]) + first_expert), ".".join(parts))


def _names_of_all_ranks(chunk: MegatronModule, own: list[str]) -> list[str]:
    """The names of all ranks, each once, in rank order; gathered once in the life of a model, and kept in it."""
    if not hasattr(chunk, "names_of_all_ranks"):
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        chunk.names_of_all_ranks = list(dict.fromkeys(name for names in gathered for name in names))
    return chunk.names_of_all_ranks


def _squares(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of each tensor, float64 on the device."""
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device=_device())
    return (
        torch.stack([torch.linalg.vector_norm(piece.detach(), dtype=torch.float32) for piece in pieces]).double() ** 2
    )


def _device() -> torch.device | int:
    """This process's device; on a CPU run Megatron-Core's stand-in answers."""
    return torch.cuda.current_device()
