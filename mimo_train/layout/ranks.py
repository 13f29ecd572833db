"""The layout of a run: the ranks of each module and pipeline stage, and the edges between modules.

A module has tp * cp * dp * pp ranks from its first rank, with tp innermost, then cp, dp, pp (the order of the
`HyperCommGrid` in `groups`). One microbatch is `micro_batch_size * dp(language)` samples. Each data-parallel rank of a
module takes `1/dp` of them, so every module sees the same samples in the same order at any layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.placement import Edge, connections, place

AXES = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")
"""Parallel sizes of a module, in display order."""


@dataclass(frozen=True)
class ModuleLayout:
    """Parallel sizes and ranks of one module."""

    name: str
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    sp: bool
    first_rank: int
    etp: int = 1
    vpp: int = 1
    fsdp: bool = False
    """True if data-parallel ranks share the parameters."""
    balance: str = "samples"
    """The unit that is dealt to an encoder's replicas: samples or images."""
    pass_microbatches: int = 1
    """Microbatches whose media items are dealt together, since an encoder computes them in one pass."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert: the ranks of a stage divided by ep and etp."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def ranks(self) -> range:
        """The ranks, in order."""
        return range(self.first_rank, self.first_rank + self.size)

    def stage_ranks(self, stage: int) -> range:
        """Return the ranks of one pipeline stage."""
        width = self.size // self.pp
        return range(self.first_rank + stage * width, self.first_rank + (stage + 1) * width)

    def stage_name(self, stage: int) -> str:
        """Return the module's name, with the stage (from 1) if there are several."""
        return f"{self.name}, stage {stage + 1} of {self.pp}" if self.pp > 1 else self.name

    def __str__(self) -> str:
        sizes = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " ".join(sizes + [name for name in ("sp", "fsdp") if getattr(self, name)]) or "one rank"


@dataclass(frozen=True)
class RunLayout:
    """The modules of a run, their ranks, and the edges between them."""

    modules: dict[str, ModuleLayout]
    edges: tuple[Edge, ...]
    """Edges in the order of the config."""
    processes: tuple[int, ...]
    """Launcher rank of each rank; processes without a module have no rank."""
    ranks_per_node: int = 0
    """0 if unknown, or if all ranks are on one node."""

    @property
    def language(self) -> ModuleLayout:
        """The layout of the module with the loss."""
        return self.modules[LANGUAGE]

    @property
    def disjoint_edges(self) -> tuple[Edge, ...]:
        """Edges between modules on different ranks, whose features are sent."""
        return tuple(edge for edge in self.edges if not edge.is_shared)

    @property
    def shared_edges(self) -> tuple[Edge, ...]:
        """Edges whose source runs inside the destination's first stage."""
        return tuple(edge for edge in self.edges if edge.is_shared)

    @property
    def piped_modules(self) -> tuple[str, ...]:
        """Modules that are pipeline stages, sources before destinations: all that do not run inside another one."""
        inside = {edge.source for edge in self.shared_edges}
        return tuple(name for name in self._sources_first() if name not in inside)

    def edges_from(self, source: str) -> tuple[Edge, ...]:
        """Return the edges from a module."""
        return tuple(edge for edge in self.edges if edge.source == source)

    @property
    def world_size(self) -> int:
        """Number of processes with a module."""
        return len(self.processes)

    @property
    def logging_rank(self) -> int:
        """The rank that writes the log: the first one that computes the loss."""
        return self.language.stage_ranks(self.language.pp - 1)[0]

    def processes_of(self, ranks: Sequence[int]) -> range:
        """Return the launcher ranks of consecutive ranks of one module."""
        return range(self.processes[ranks[0]], self.processes[ranks[-1]] + 1)

    def on_rank(self, rank: int) -> list[str]:
        """Return the names of the modules on `rank`, in the order of the config."""
        return [name for name, module in self.modules.items() if rank in module.ranks]

    def kind_of(self, rank: int) -> str:
        """Return the modules on `rank` and their stages, as text; ranks with the same text run the same code."""
        kinds = []
        for name in self.on_rank(rank):
            module = self.modules[name]
            stage = (rank - module.first_rank) // (module.size // module.pp)
            kinds.append(module.stage_name(stage))
        return " + ".join(kinds)

    def _sources_first(self) -> list[str]:
        """Return every module after its sources, else in the order of the config."""
        ordered: list[str] = []
        waiting = list(self.modules)
        while waiting:
            name = next(
                name
                for name in waiting
                if all(edge.source in ordered for edge in self.edges if edge.destination == name)
            )
            ordered.append(name)
            waiting.remove(name)
        return ordered


def layers_of_stage(num_layers: int, stage: int, stages: int) -> int:
    """Return the number of layers of one pipeline stage. The remainder goes to the first stage, since the last one
    computes the output layer."""
    share = num_layers // stages
    return num_layers - (stages - 1) * share if stage == 0 else share


def stage_layers(num_layers: int, stage: int, stages: int, chunks: int = 1) -> list[int]:
    """Return the layers of one pipeline stage, numbered from 0 over the module. Interleaved model chunks have equal
    sizes and follow each other."""
    if chunks > 1:
        share = num_layers // (stages * chunks)
        starts = [(chunk * stages + stage) * share for chunk in range(chunks)]
        return [layer for start in starts for layer in range(start, start + share)]
    first = sum(layers_of_stage(num_layers, earlier, stages) for earlier in range(stage))
    return list(range(first, first + layers_of_stage(num_layers, stage, stages)))


def lay_out(cfg: ConfigContainer) -> RunLayout:
    """Return the layout of a config without faults of modules and placement (see `mimo_train.layout.run`)."""
    placement, modules = place(cfg), {}
    for name, module in cfg.modules.items():
        sizes = module.layout
        modules[name] = ModuleLayout(
            name=name,
            tp=sizes.tp,
            pp=sizes.pp,
            dp=sizes.dp,
            cp=sizes.cp,
            ep=sizes.ep,
            sp=sizes.sp and sizes.tp > 1,
            first_rank=placement.first_ranks[name],
            etp=sizes.etp,
            vpp=sizes.vpp,
            fsdp=sizes.fsdp and sizes.dp > 1,
            balance=module.balance,
            pass_microbatches=max(1, module.prefetch_microbatches),
        )
    edges = tuple(
        Edge(
            source,
            destination,
            "shared" if modules[source].ranks == modules[destination].stage_ranks(0) else "disjoint",
        )
        for source, destination in connections(cfg)
    )
    for edge in edges:
        if edge.is_shared:  # computes ahead after a step only, and else one microbatch at a time
            modules[edge.source] = replace(modules[edge.source], pass_microbatches=1)
    return RunLayout(modules, edges, placement.processes, cfg.placement.ranks_per_node)


def stages_to_end(layout: RunLayout, name: str, stage: int) -> int:
    """Return the pipeline stages from a stage of a module, included, to the end of the longest path of its features. A
    module inside the first stage of another counts as that stage."""
    edges = layout.edges_from(name)
    behind = max((stages_to_end(layout, edge.destination, 0) for edge in edges), default=0)
    if any(edge.is_shared for edge in edges):
        return behind
    return layout.modules[name].pp - stage + behind


def pipeline_stages(layout: RunLayout) -> int:
    """Return the number of stages on the longest path of a microbatch through the modules."""
    return max(stages_to_end(layout, name, 0) for name in layout.modules)


def warm_up(layout: RunLayout, name: str, stage: int) -> int:
    """Return the microbatches that a stage without interleaving computes before it takes turns of forward and backward.
    The last stage in front of interleaved ones has the largest lead of forward over backward in `first_chunk_order`:
    2 pp - 1, with pp of the language model, at any number of chunks and microbatches."""
    language = layout.language
    return stages_to_end(layout, name, stage) - 1 + (language.pp - 1 if language.vpp > 1 else 0)


def first_chunk_order(microbatches: int, stages: int, chunks: int) -> list[bool]:
    """Return the order in which the first of several chunks of the first stage computes, True for forward. Forward and
    backward each go through the microbatches in order.

    As the interleaved 1F1B of Megatron-Core 0.19.2 (schedules.py:902-989), whose chunks take `stages` microbatches in
    turn.
    """
    chunk_of = [chunk for _ in range(0, microbatches, stages) for chunk in range(chunks) for _ in range(stages)]
    total = microbatches * chunks
    warm_up = min(total, 2 * (stages - 1) + (chunks - 1) * stages)
    order = []
    for step in range(total + warm_up):
        if step < total and chunk_of[step] == 0:
            order.append(True)
        if step >= warm_up and chunk_of[step - warm_up] == chunks - 1:
            order.append(False)
    return order
