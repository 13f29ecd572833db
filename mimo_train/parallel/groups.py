"""Layouts -> grids of ranks -> process groups. The one file that creates process groups.

Every rank creates every group of every module in the same order, as torch.distributed requires, and keeps those it
belongs to. Axis order in a grid: tp innermost, then cp, dp, pp.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import RunConfig
from mimo_train.plan.layout import ModuleLayout, RunLayout

EXPERT_VIEW = "expert"
"""Name of the grid's second factorisation; Megatron-Core's MIMO optimizer looks it up (mimo/optimizer.py)."""


@dataclass
class RunGroups:
    """Grids of all modules, and this rank's process groups."""

    grids: dict[str, HyperCommGrid]
    collections: dict[str, ProcessGroupCollection]
    """Process groups of the modules on this rank."""

    @property
    def multi_module(self) -> MultiModuleProcessGroupCollection:
        """This rank's collections in the form that Megatron-Core's schedules take for several modules."""
        return MultiModuleProcessGroupCollection(
            module_pgs=self.collections,
            language_model_module_name=LANGUAGE if LANGUAGE in self.collections else None,
        )


def build_groups(layout: RunLayout, timeout_minutes: float = RunConfig.timeout_minutes) -> RunGroups:
    """Create the process groups of a run; collective over all ranks.

    Args:
        timeout_minutes: `run.timeout_minutes`. A group of gloo that is given none waits for 30 minutes, whatever the
            processes met with.
    """
    timeout = timedelta(minutes=timeout_minutes)
    grids, collections = {}, {}
    for name, module in layout.modules.items():
        grid = _build_grid(module, timeout)
        # Only a language model shares weights between stages: Megatron-Core looks for them where there is a group.
        embedding_groups = _build_embedding_groups(grid, timeout) if name == LANGUAGE else ()
        grids[name] = grid
        if grid.is_current_rank_in_grid():
            # For an encoder it is a group of this rank alone, like cp: for None, Megatron-Core 0.19.2 uses the group
            # in its global state (finalize_model_grads.py:190), which on shared ranks is the language model's.
            collections[name] = _collect(grid, *(embedding_groups or 2 * (grid.get_pg("cp"),)))
    _bridge_parallel_state(collections.get(LANGUAGE) or next(iter(collections.values())))
    return RunGroups(grids, collections)


_BASE_GROUPS = (["tp"], ["cp"], ["dp"], ["pp"], ["tp", "pp"], ["tp", "cp"], ["dp", "cp"], ["tp", "dp", "cp"])
_EXPERT_GROUPS = (["expt_tp"], ["ep"], ["expt_dp"], ["expt_tp", "ep"], ["expt_tp", "ep", "pp"])


def _build_grid(module: ModuleLayout, timeout: timedelta) -> HyperCommGrid:
    grid = HyperCommGrid(
        [module.tp, module.cp, module.dp, module.pp], ["tp", "cp", "dp", "pp"], rank_offset=module.first_rank
    )
    grid.register_view(
        EXPERT_VIEW,
        [module.etp, module.ep, module.expert_dp, module.pp],
        ["expt_tp", "ep", "expt_dp", "pp"],
        shared_dims=["pp"],
    )
    for axes in (*_BASE_GROUPS, ["tp", "cp", "dp", "pp"]):
        grid.create_pg(axes, timeout=timeout, group_desc=_description(module, axes))
    for axes in _EXPERT_GROUPS:
        grid.create_pg(axes, view=EXPERT_VIEW, timeout=timeout, group_desc=_description(module, axes))
    return grid


def _description(module: ModuleLayout, axes: list[str]) -> str:
    """For the flight recorder's reports: `language tp-cp`."""
    return f"{module.name} {'-'.join(axes)}"


def _build_embedding_groups(
    grid: HyperCommGrid, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Groups of the first and last stage (shared embedding weights) and of the first stage (position embeddings)."""
    own_embedding = own_position = None
    for stages in grid.get_rank_enum("pp"):
        embedding_ranks = sorted({stages[0], stages[-1]})
        embedding = dist.new_group(embedding_ranks, timeout=timeout, group_desc="embedding weights")
        position = dist.new_group(stages[:1], timeout=timeout, group_desc="position embeddings")
        if dist.get_rank() in embedding_ranks:
            own_embedding = embedding
        if dist.get_rank() == stages[0]:
            own_position = position
    return own_embedding, own_position


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
