"""The other ranks, which do not exist: torch's fake process groups, and the objects that ranks exchange. Messages take
no time and bring nothing; every rank is assumed to send the same objects as this one."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.parameters import module_parameters
from mimo_train.layout.ranks import ModuleLayout
from mimo_train.layout.run import Run
from mimo_train.preflight.dry_run.fake_tensors import FakeCounts

PER_NODE = 8
"""Ranks of a node, if the config does not set it."""


def join(rank: int, world: int, per_node: int = 0) -> None:
    """Become one rank of a world, for the rest of this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    local_size = min(per_node or PER_NODE, world)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % local_size), LOCAL_WORLD_SIZE=str(local_size)
    )
    if "meta" not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append("meta")  # the actual device of tensors on a fake GPU
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    for name, replacement in {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": lambda *_, **__: None,
        "barrier": lambda *_, **__: None,
        "new_group": _on_the_fake_backend(distributed_c10d.new_group),
        "new_subgroups_by_enumeration": _on_the_fake_backend(distributed_c10d.new_subgroups_by_enumeration),
    }.items():
        setattr(dist, name, replacement)
        setattr(distributed_c10d, name, replacement)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _on_the_fake_backend(original: Callable) -> Callable:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs["backend"] = None  # the world's
        return original(*args, **kwargs)

    return make


def trained_parts(cfg: ConfigContainer, module: ModuleLayout) -> Iterator[tuple[tuple[str, int, bool], int]]:
    """Yield ((module, stage, True for the encoder), step from which it is trained) of each trained part. A `freeze`
    pattern counts as leaving something to train in its part."""
    until = cfg.modules[module.name].freeze_until
    for stage in range(module.pp):
        for part, count in module_parameters(cfg, module.name, 0, tp=module.tp, stage=stage, stages=module.pp).items():
            if count.trainable:
                yield (module.name, stage, part != "projector"), until.get(part, 0)


def install_gradient_needs(run: Run) -> None:
    """Take the gradient needs of modules on other ranks from the config, for the rest of this process."""
    from mimo_train.training import setup as setting_up

    class Needs(setting_up.GradientNeeds):
        def __init__(self, layout: Any, modules: Any, releases: Any, groups: Any):
            super().__init__(layout, modules, releases, groups)
            local = {(name, groups.collections[name].pp.rank()) for name in modules}
            for name in self._stages:
                for place, step in trained_parts(run.cfg, layout.modules[name]):
                    if place[:2] not in local:
                        self._first_steps.setdefault(place, step)

    setting_up.GradientNeeds = Needs  # type: ignore[misc]


def balanced(rows: int, experts: int) -> numpy.ndarray:
    """Return the rows of each expert; the first ones have the rest."""
    share, left = divmod(rows, experts)
    return numpy.array([share + (expert < left) for expert in range(experts)])


def balance_experts(counts: FakeCounts) -> None:
    """Give every expert equally many tokens from each rank, for the rest of this process, since router choices have no
    values. Megatron-Core 0.19.2 copies the tokens of each expert to the host and splits by them (token_dispatcher.py,
    `MoEAlltoAllTokenDispatcher.preprocess`)."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    original = Dispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        tokens = original(self, routing_map)
        if self.drop_and_pad:
            return tokens
        rows = routing_map.size(0) * self.config.moe_router_topk
        counts.selected = rows
        each, ranks = balanced(rows, self.num_experts), self.tp_size * self.ep_size
        local = each[self.local_expert_indices]
        if ranks > 1:
            self.input_splits = each.reshape(self.ep_size, self.num_local_experts).sum(axis=1)
            self.output_splits = numpy.full(self.ep_size, local.sum())
            self.output_splits_tp = numpy.full(self.tp_size, local.sum() * self.ep_size)
        with counts.on_the_host():
            if self.num_local_experts > 1:
                self.num_global_tokens_per_local_expert = torch.from_numpy(numpy.tile(local, (ranks, 1)))
            return torch.from_numpy(local * ranks)

    Dispatcher.preprocess = preprocess
