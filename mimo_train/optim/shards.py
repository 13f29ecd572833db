"""The ranges of matrices that an optimizer holds on this rank, and what is summed or exchanged to see whole matrices.

The distributed optimizer cuts all parameters of a rank into flat ranges, one for each data-parallel rank, that ignore
rows; tensor parallelism cuts rows or columns before. Muon and Adafactor need whole matrices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention

Range = tuple[int, int]
"""First and last + 1 element."""


@dataclass(frozen=True, eq=False)
class Shard:
    """An optimizer's range of one parameter of this rank."""

    parameter: torch.nn.Parameter
    """The model's parameter: this rank's tensor-parallel part."""
    ranges: tuple[Range, ...]
    """Elements of the parameter that each rank of `replicas` updates; one range if replicas hold all of it."""
    index: int
    """This rank's place in `ranges`."""
    replicas: dist.ProcessGroup | None
    """Ranks that share the elements; None if replicas hold all of it."""
    tensor_parallel: dist.ProcessGroup
    sections: tuple[int, ...] = ()
    """Rows of the matrices that a fused one repeats: queries, keys and values of a group of heads, or gate and up."""

    @property
    def start(self) -> int:
        """First element of this rank."""
        return self.ranges[self.index][0]

    @property
    def stop(self) -> int:
        """Last element of this rank + 1."""
        return self.ranges[self.index][1]

    @property
    def cut(self) -> int | None:
        """Dimension that tensor parallelism cuts, None for neither."""
        # Transformer Engine sets a dimension for weights that ranks duplicate too.
        is_cut = getattr(self.parameter, "tensor_model_parallel", False) and self.tensor_parallel.size() > 1
        dim = getattr(self.parameter, "partition_dim", -1)
        return dim if is_cut and dim in (0, 1) else None


def shards_of(
    optimizer: MegatronOptimizer, groups: ProcessGroupCollection, sections: dict[int, tuple[int, ...]]
) -> tuple[dict[torch.Tensor, Shard], list[Shard]]:
    """Return (the shard of every tensor that a Megatron-Core optimizer updates, all shards of its replicas in the same
    order on each). `sections`: by id of the parameter, see `fused_sections`."""
    if not isinstance(optimizer, DistributedOptimizer):
        by_tensor = {}
        for parameter in model_parameters(optimizer):
            ranks, fused = _tensor_parallel(parameter, groups), sections.get(id(parameter), ())
            shard = Shard(parameter, ((0, parameter.numel()),), 0, None, ranks, fused)
            by_tensor[getattr(parameter, "main_param", parameter)] = shard
        return by_tensor, list(by_tensor.values())
    shards = []
    for buffer in optimizer.buffers:
        replicas = buffer.data_parallel_group
        for parameter, (first, last, bucket) in buffer.param_index_map.items():
            begin, size = buffer.buckets[bucket].offset, buffer.buckets[bucket].grad_data.numel() // replicas.size()
            bounds = [(begin + rank * size, begin + (rank + 1) * size) for rank in range(replicas.size())]
            ranges = tuple((max(low, first) - first, max(min(high, last), first) - first) for low, high in bounds)
            ranks, fused = _tensor_parallel(parameter, groups), sections.get(id(parameter), ())
            shards.append(Shard(parameter, ranges, replicas.rank(), replicas, ranks, fused))
    by_tensor = {}
    for shard in shards:
        if shard.start < shard.stop:
            group, place = optimizer.model_param_group_index_map[shard.parameter]
            by_tensor[optimizer.optimizer.param_groups[group]["params"][place]] = shard
    return by_tensor, shards


def model_parameters(optimizer: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Return the model's parameters of an optimizer whose replicas hold the whole state."""
    if hasattr(optimizer, "float16_groups"):
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
        return [parameter for group in groups for parameter in group]
    return list(optimizer.get_parameters())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def _tensor_parallel(parameter: torch.nn.Parameter, groups: ProcessGroupCollection) -> dist.ProcessGroup:
    return groups.tp if getattr(parameter, "allreduce", True) else groups.expt_tp


def fused_sections(chunks: Sequence[torch.nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return the rows of the matrices that fused weights repeat, by id of the weight: as Megatron-Core's Muon splits
    queries, keys and values of each group of heads; halves of gated layers; parts of a Gated DeltaNet."""
    sections: dict[int, tuple[int, ...]] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, SelfAttention) and isinstance(getattr(module.linear_qkv, "weight", None), torch.Tensor):
            sections[id(module.linear_qkv.weight)] = tuple(_get_qkv_split_shapes(module.config))
        if hasattr(module, "linear_fc1") and getattr(getattr(module, "config", None), "gated_linear_unit", False):
            for name, weight in cast(torch.nn.Module, module.linear_fc1).named_parameters(recurse=False):
                if weight.dim() == 2 and name != "lora_a":
                    sections[id(weight)] = (weight.shape[0] // 2,) * 2
        for weight in module.parameters(recurse=False):
            if parts := getattr(weight, "partition_sections", None):
                sections[id(weight)] = tuple(part * weight.shape[0] // sum(parts) for part in parts)
    return sections


def exchange(shards: Sequence[Shard], values: dict[int, torch.Tensor]) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield the parameters of which this rank has a range, with all elements, in the parameter's shape. Replicas send
    each other only the rest of parameters that both hold a part of, in one message. Collective over the replicas.

    Args:
        shards: all shards of the replicas, in the same order on each.
        values: this rank's elements of its shards, fp32, by id of the parameter.
    """
    if not shards:
        return
    replicas, held = shards[0].replicas, [shard for shard in shards if shard.start < shard.stop]
    received: dict[int, list[tuple[Range, torch.Tensor]]] = {}
    if replicas is not None and replicas.size() > 1:
        device = shards[0].parameter.device
        sent: list[torch.Tensor] = []
        sizes_out, sizes_in, places = [], [], []
        for rank in range(replicas.size()):
            others = [] if rank == replicas.rank() else held
            shared = [shard for shard in others if shard.ranges[rank][0] < shard.ranges[rank][1]]
            sent += [values[id(shard.parameter)] for shard in shared]
            sizes_out.append(sum(shard.stop - shard.start for shard in shared))
            sizes_in.append(sum(shard.ranges[rank][1] - shard.ranges[rank][0] for shard in shared))
            places += [(shard, shard.ranges[rank]) for shard in shared]
        message = torch.cat(sent) if sent else torch.empty(0, device=device)
        buffer = torch.empty(sum(sizes_in), device=device)
        dist.all_to_all_single(buffer, message, sizes_in, sizes_out, group=replicas)
        for shard, (first, last) in places:
            part, buffer = buffer[: last - first], buffer[last - first :]
            received.setdefault(id(shard.parameter), []).append(((first, last), part))
    for shard in held:
        flat = values[id(shard.parameter)]
        if id(shard.parameter) in received:
            others_parts = received[id(shard.parameter)]
            parts = sorted([((shard.start, shard.stop), flat), *others_parts], key=lambda part: part[0])
            flat = torch.cat([part for _, part in parts])
        yield shard, flat.view(shard.parameter.shape)
