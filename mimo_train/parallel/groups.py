"""The process groups of one rank. A rank makes only the groups that it belongs to, each once.

By default in torch a rank calls `new_group` for every group of the run, 10,872 times at 2,176 ranks, and joins a
collective over the world for each. Here members alone make a group (`use_local_synchronization`), so the number of
calls does not grow with the world. This excludes a `device_id` bound to the world's group: NCCL would split every group
off the world's communicator, which waits for all ranks (torch 2.11, distributed_c10d.py:1977-1997).

Members of overlapping groups must make them in one order. Every rank goes through the same list of axes, whose groups
are disjoint, and makes its own.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection
from torch.distributed import distributed_c10d

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema_run import RunConfig
from mimo_train.layout.placement import Edge
from mimo_train.layout.ranks import ModuleLayout, RunLayout
from mimo_train.parallel import device

LAYERS = "layers"
"""Messages inside layers: tensor, context and expert parallel."""
GRADIENTS = "gradients"
"""Reductions of gradients and norms, which may run alongside those of the layers."""
STAGES = "stages"
"""Messages between the stages of one module."""
EMBEDDING = "embedding"
"""The reduction of gradients of weights that the first and the last stage share."""
BRIDGE = "bridge"
"""Messages between modules."""

_BETWEEN_TWO = (STAGES, BRIDGE)


class RankGroups:
    """Makes this rank's groups; `made` has the ranks of each, in order.

    Groups of the same ranks are shared only if owner and purpose are equal. NCCL runs the messages of a communicator in
    the order in which they are issued, and a send waits for its receiver. Two uses of one communicator would therefore
    have to be issued in one order on all ranks. The world's group is never reused: it belongs to the metric reduction.
    """

    def __init__(self, timeout: timedelta):
        self.made: list[tuple[int, ...]] = []
        self._timeout = timeout
        self._groups: dict[tuple[str, str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._backend = device.backend_of_groups()

    def of(self, ranks: Sequence[int], owner: str, purpose: str, description: str) -> dist.ProcessGroup:
        """Return the group of `ranks`, which include this rank. Collective over them.

        Args:
            owner: the module, or the edge between two modules.
            description: name in the flight recorder's reports; the first use sets it.
        """
        assert dist.get_rank() in ranks, (dist.get_rank(), ranks)
        # All single-rank groups are one: no other rank could issue messages in another order.
        key = ("", "", tuple(ranks)) if len(ranks) == 1 else (owner, purpose, tuple(ranks))
        if key not in self._groups:
            self.made.append(tuple(ranks))
            with _with_group_name(" ".join(map(str, key))):
                group = dist.new_group(
                    list(ranks),
                    timeout=self._timeout,
                    backend=self._backend,
                    use_local_synchronization=True,
                    group_desc=description if len(ranks) > 1 else "this rank alone",
                )
            if len(ranks) > 1 and purpose in _BETWEEN_TWO:
                # A communicator of NCCL starts with its first message, which needs all its ranks. A point-to-point
                # message (torch's `batch_isend_irecv`) does not involve all of them.
                dist.all_reduce(torch.zeros(1, device=device.current()), group=group)
            self._groups[key] = group
        return self._groups[key]


@contextmanager
def _with_group_name(name: str) -> Iterator[None]:
    """Name the group that is made in the block: members meet under its name.

    torch 2.11 includes the number of a rank's groups in the name of a group with local synchronization
    (`_hash_ranks_to_str`). Members that are in different other groups would get different names and wait for each
    other. The name has a counter, because one process may set up several runs in turn.
    """
    original = distributed_c10d._process_group_name
    used = {*distributed_c10d._world.pg_names.values()}
    names = (hashlib.sha256(f"{name}, {number}".encode()).hexdigest() for number in itertools.count())
    unused = distributed_c10d.GroupName(next(name for name in names if name not in used))
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: unused
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


class RankGrid(HyperCommGrid):
    """A grid of ranks with this rank's groups only. Megatron-Core 0.19.2's grid makes every group of an axis on every
    rank (`new_subgroups_by_enumeration`, hyper_comm_grid.py)."""

    def __init__(self, shape: list[int], axes: list[str], rank_offset: int, name: str, groups: RankGroups):
        super().__init__(shape, axes, rank_offset=rank_offset)
        self._name, self._groups = name, groups
        self._of_axes: dict[frozenset[str], dist.ProcessGroup | None] = {}

    def create_pg(
        self, dims: str | list[str], *, view: str | None = None, purpose: str = LAYERS
    ) -> dist.ProcessGroup | None:
        """Make this rank's group along `dims`; return None if it is not in the grid."""
        dims = [dims] if isinstance(dims, str) else dims
        rank = dist.get_rank()
        ranks = next((each for each in self.get_rank_enum(dims, view=view) if rank in each), None)
        group = self._groups.of(ranks, self._name, purpose, f"{self._name} {'-'.join(dims)}") if ranks else None
        # Views have different axis names, except for the axes that they share.
        self._of_axes[frozenset(dims)] = group
        return group

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup | None:
        """Return the group that `create_pg` made. Raise KeyError if it made none."""
        return self._of_axes[frozenset([dims] if isinstance(dims, str) else dims)]


EXPERT_VIEW = "expert"
"""Name of the grid's second factorization; Megatron-Core's MIMO optimizer looks it up (mimo/optimizer.py)."""


@dataclass
class RunGroups:
    """The grids of all modules, and this rank's process groups."""

    grids: dict[str, HyperCommGrid]
    collections: dict[str, ProcessGroupCollection]
    """Process groups of the modules on this rank."""
    bridges: dict[Edge, dist.ProcessGroup]
    """Groups of the edges on which this rank sends or receives features."""
    made: tuple[tuple[int, ...], ...]
    """Ranks of each group that this rank made, in order."""

    @property
    def multi_module(self) -> MultiModuleProcessGroupCollection:
        """This rank's collections in the form that Megatron-Core's multi-module schedules take."""
        return MultiModuleProcessGroupCollection(
            module_pgs=self.collections,
            language_model_module_name=LANGUAGE if LANGUAGE in self.collections else None,
        )


def build_groups(layout: RunLayout, timeout_minutes: float = RunConfig.timeout_minutes) -> RunGroups:
    """Make this rank's process groups of a run. Collective over the ranks of each group. Without `timeout_minutes`
    (`run.timeout_minutes`), gloo groups wait for 30 minutes, whatever the timeout of the rendezvous."""
    groups = RankGroups(timedelta(minutes=timeout_minutes))
    grids, collections = {}, {}
    for name, module in layout.modules.items():
        grids[name] = grid = _build_grid(module, groups)
        if grid.is_current_rank_in_grid():
            # Only a language model shares weights between stages: Megatron-Core looks for them if there is a group. An
            # encoder gets a single-rank group, like cp. For None, Megatron-Core 0.19.2 uses the group in its global
            # state (finalize_model_grads.py:190), which on shared ranks is the language model's.
            embedding = _embedding_groups(grid, groups) if name == LANGUAGE else 2 * (grid.get_pg("cp"),)
            collections[name] = _collect(grid, *embedding)
    bridges = dict(_bridges(layout, groups))
    if collections:  # no module of a student is on ranks of its teacher alone
        _bridge_parallel_state(collections.get(LANGUAGE) or next(iter(collections.values())))
    return RunGroups(grids, collections, bridges, tuple(groups.made))


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


def _build_grid(module: ModuleLayout, groups: RankGroups) -> RankGrid:
    sizes = [module.tp, module.cp, module.dp, module.pp]
    grid = RankGrid(sizes, ["tp", "cp", "dp", "pp"], module.first_rank, module.name, groups)
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


def _embedding_groups(
    grid: HyperCommGrid, groups: RankGroups
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups of the first and last stage (embedding weights) and of the first stage (position
    embeddings)."""
    rank = dist.get_rank()
    stages = next(stages for stages in grid.get_rank_enum("pp") if rank in stages)
    ends = sorted({stages[0], stages[-1]})
    embedding = groups.of(ends, LANGUAGE, EMBEDDING, "embedding weights") if rank in ends else None
    position = groups.of(stages[:1], LANGUAGE, EMBEDDING, "position embeddings") if rank == stages[0] else None
    return embedding, position


def _bridges(layout: RunLayout, groups: RankGroups) -> Iterator[tuple[Edge, dist.ProcessGroup]]:
    """Yield the groups of the ranks of an edge: the source's last stage and the destination's first stage.

    Over gloo there are none: bridges use the world's group. Nothing else refers to that group, so a rank that fails
    closes its connections and no rank waits for it. gloo aborts no message of other groups (torch 2.11), and an
    in-process restart would wait for them.
    """
    for edge in layout.edges:
        source, destination = layout.modules[edge.source], layout.modules[edge.destination]
        ranks = sorted({*source.stage_ranks(source.pp - 1), *destination.stage_ranks(0)})
        if dist.get_rank() in ranks:
            name = f"{edge.source}->{edge.destination}"
            if device.backend_of_groups() == "nccl":
                yield edge, groups.of(ranks, name, BRIDGE, name)


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
    # Without weight rematerialization groups (GTP) and partial optimizer instances these equal the plain groups.
    pgs.dp_cp_gtp_remat = pgs.intra_dp_cp = pgs.dp_cp
    pgs.expt_dp_gtp_remat = pgs.intra_expt_dp = pgs.expt_dp
    pgs.tp_ep_pp_with_egtp_remat = pgs.tp_ep_pp
    return pgs


def _bridge_parallel_state(pgs: ProcessGroupCollection) -> None:
    """Set this rank's groups in the global state, which parts of Megatron-Core 0.19.2 still read."""
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
