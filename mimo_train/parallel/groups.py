"""Layouts -> grids of ranks -> process groups. Every group of a run is made here.

Axis order in a grid: tp innermost, then cp, dp, pp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema_run import RunConfig
from mimo_train.layout.placement import Edge
from mimo_train.layout.ranks import ModuleLayout, RunLayout
from mimo_train.parallel import device
from mimo_train.parallel.local_groups import BRIDGE, EMBEDDING, GRADIENTS, LAYERS, STAGES, OwnGrid, OwnGroups

EXPERT_VIEW = "expert"
"""Name of the grid's second factorisation; Megatron-Core's MIMO optimizer looks it up (mimo/optimizer.py)."""


@dataclass
class RunGroups:
    """Grids of all modules, and this rank's process groups."""

    grids: dict[str, HyperCommGrid]
    collections: dict[str, ProcessGroupCollection]
    """Process groups of the modules on this rank."""
    bridges: dict[Edge, dist.ProcessGroup]
    """Of the edges on which this rank gives or takes features."""
    made: tuple[tuple[int, ...], ...]
    """Ranks of each group that this rank has made, in order."""

    @property
    def multi_module(self) -> MultiModuleProcessGroupCollection:
        """This rank's collections in the form that Megatron-Core's schedules take for several modules."""
        return MultiModuleProcessGroupCollection(
            module_pgs=self.collections,
            language_model_module_name=LANGUAGE if LANGUAGE in self.collections else None,
        )


def build_groups(layout: RunLayout, timeout_minutes: float = RunConfig.timeout_minutes) -> RunGroups:
    """Make this rank's process groups of a run; collective over the ranks of each.

    Args:
        timeout_minutes: `run.timeout_minutes`. A group of gloo that is given none waits for 30 minutes, whatever the
            processes met with.
    """
    own = OwnGroups(timedelta(minutes=timeout_minutes))
    grids, collections = {}, {}
    for name, module in layout.modules.items():
        grids[name] = grid = _build_grid(module, own)
        if grid.is_current_rank_in_grid():
            # Only a language model shares weights between stages: Megatron-Core looks for them where there is a group.
            # For an encoder it is a group of this rank alone, like cp: for None, Megatron-Core 0.19.2 uses the group
            # in its global state (finalize_model_grads.py:190), which on shared ranks is the language model's.
            embedding = _embedding_groups(grid, own) if name == LANGUAGE else 2 * (grid.get_pg("cp"),)
            collections[name] = _collect(grid, *embedding)
    bridges = dict(_bridges(layout, own))
    _bridge_parallel_state(collections.get(LANGUAGE) or next(iter(collections.values())))
    return RunGroups(grids, collections, bridges, tuple(own.made))


_BASE_GROUPS = (
    (["tp"], LAYERS),
    (["cp"], LAYERS),
    (["tp", "cp"], LAYERS),
    (["tp", "pp"], LAYERS),
    (["dp"], GRADIENTS),
    (["dp", "cp"], GRADIENTS),
    (["tp", "dp", "cp"], GRADIENTS),
    (["tp", "cp", "dp", "pp"], GRADIENTS),
    (["pp"], STAGES),
)
_EXPERT_GROUPS = (
    (["expt_tp"], LAYERS),
    (["ep"], LAYERS),
    (["expt_tp", "ep"], LAYERS),
    (["expt_tp", "ep", "pp"], LAYERS),
    (["expt_dp"], GRADIENTS),
)


def _build_grid(module: ModuleLayout, own: OwnGroups) -> OwnGrid:
    sizes = [module.tp, module.cp, module.dp, module.pp]
    grid = OwnGrid(sizes, ["tp", "cp", "dp", "pp"], module.first_rank, module.name, own)
    grid.register_view(
        EXPERT_VIEW,
        [module.etp, module.ep, module.expert_dp, module.pp],
        ["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    for axes, purpose in _BASE_GROUPS:
        grid.create_pg(axes, purpose=purpose)
    for axes, purpose in _EXPERT_GROUPS:
        grid.create_pg(axes, view=EXPERT_VIEW, purpose=purpose)
    return grid


def _embedding_groups(grid: HyperCommGrid, own: OwnGroups) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Groups of the first and last stage (shared embedding weights) and of the first stage (position embeddings)."""
    rank = dist.get_rank()
    stages = next(stages for stages in grid.get_rank_enum("pp") if rank in stages)
    ends = sorted({stages[0], stages[-1]})
    embedding = own.of(ends, LANGUAGE, EMBEDDING, "embedding weights") if rank in ends else None
    position = own.of(stages[:1], LANGUAGE, EMBEDDING, "position embeddings") if rank == stages[0] else None
    return embedding, position


def _bridges(layout: RunLayout, own: OwnGroups) -> Iterator[tuple[Edge, dist.ProcessGroup]]:
    """Groups of the ranks of an edge: the source's last stage and the destination's first.

    Over gloo none, which is the world's: nothing else refers to that one, so that a rank that fails closes its
    connections as it is destroyed, and nobody waits for it. gloo aborts no message of a group (torch 2.11), and an
    in-process restart would wait for those who wait for this rank.
    """
    for edge in layout.edges:
        source, destination = layout.modules[edge.source], layout.modules[edge.destination]
        ranks = sorted({*source.stage_ranks(source.pp - 1), *destination.stage_ranks(0)})
        if dist.get_rank() in ranks:
            name = f"{edge.source}->{edge.destination}"
            if device.backend_of_groups() == "nccl":
                yield edge, own.of(ranks, name, BRIDGE, name)


def _collect(
    grid: HyperCommGrid, embedding: dist.ProcessGroup | None, position: dist.ProcessGroup | None
) -> ProcessGroupCollection:
    def base(*axes: str) -> dist.ProcessGroup:
        return grid.get_pg(list(axes))

    def expert(*axes: str) -> dist.ProcessGroup:
        return grid.get_pg(list(axes), view=EXPERT_VIEW)

    pgs = ProcessGroupCollection(
        tp=base("tp"),
        cp=base("cp"),
        dp=base("dp"),
        pp=base("pp"),
        mp=base("tp", "pp"),
        tp_cp=base("tp", "cp"),
        dp_cp=base("dp", "cp"),
        tp_dp_cp=base("tp", "dp", "cp"),
        embd=embedding,
        pos_embd=position,
        ep=expert("ep"),
        expt_tp=expert("expt_tp"),
        expt_dp=expert("expt_dp"),
        tp_ep=expert("expt_tp", "ep"),
        tp_ep_pp=expert("expt_tp", "ep", "pp"),
        intra_dist_opt=base("tp", "cp", "dp", "pp"),
    )
    # Without weight rematerialisation groups (GTP) and partial optimizer instances these equal their plain twins.
    pgs.dp_cp_gtp_remat = pgs.intra_dp_cp = pgs.dp_cp
    pgs.expt_dp_gtp_remat = pgs.intra_expt_dp = pgs.expt_dp
    pgs.tp_ep_pp_with_egtp_remat = pgs.tp_ep_pp
    return pgs


def _bridge_parallel_state(pgs: ProcessGroupCollection) -> None:
    """Set this rank's groups for the parts of Megatron-Core 0.19.2 that still read its global state; we never do."""
    state = parallel_state
    state._TENSOR_MODEL_PARALLEL_GROUP = pgs.tp
    state._PIPELINE_MODEL_PARALLEL_GROUP = pgs.pp
    state._MODEL_PARALLEL_GROUP = pgs.mp
    state._CONTEXT_PARALLEL_GROUP = pgs.cp
    state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = pgs.tp_cp
    state._DATA_PARALLEL_GROUP = pgs.dp
    state._DATA_PARALLEL_GROUP_WITH_CP = pgs.dp_cp
    state._TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP = pgs.tp_dp_cp
    state._EMBEDDING_GROUP = pgs.embd
    state._POSITION_EMBEDDING_GROUP = pgs.pos_embd
    state._EXPERT_MODEL_PARALLEL_GROUP = pgs.ep
    state._EXPERT_TENSOR_PARALLEL_GROUP = pgs.expt_tp
    state._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = pgs.tp_ep
    state._EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP = pgs.tp_ep_pp
    state._EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP = pgs.tp_ep_pp
    state._EXPERT_DATA_PARALLEL_GROUP = state._EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT = pgs.expt_dp
    state._DATA_PARALLEL_GROUP_WITH_GTP_REMAT = pgs.dp
    state._DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT = pgs.dp_cp
    for group, ranks in (
        ("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", pgs.tp),
        ("_PIPELINE_GLOBAL_RANKS", pgs.pp),
        ("_CONTEXT_PARALLEL_GLOBAL_RANKS", pgs.cp),
        ("_DATA_PARALLEL_GLOBAL_RANKS", pgs.dp),
    ):
        setattr(state, group, dist.get_process_group_ranks(ranks))
    if state._GLOBAL_MEMORY_BUFFER is None:
        state._set_global_memory_buffer()
