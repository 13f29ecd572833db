"""A candidate layout: its config, and the memory of its fullest rank."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_run import PlacementConfig
from mimo_train.estimate.memory import Memory, activations_of_stage, state_of_stage
from mimo_train.layout.batch import Batch
from mimo_train.layout.placement import Edge, connections
from mimo_train.layout.ranks import ModuleLayout, RunLayout
from mimo_train.layout.run import Run


def ranks_of(layout: LayoutConfig) -> int:
    """Return the number of ranks of a module."""
    return layout.tp * layout.cp * layout.dp * layout.pp


@dataclass(frozen=True)
class Candidate:
    """Parallel sizes and placement of modules."""

    layouts: Mapping[str, LayoutConfig]
    """Layouts of all modules, or only of the language model while encoders are not chosen yet."""
    micro_batch_size: int
    recompute: str
    """`train.recompute`."""
    distributed_optimizer: bool
    node: int
    """GPUs of a node; 0: all are on one node."""
    gpus: int
    shared: frozenset[str] = frozenset()
    """Encoders on the ranks of the language model's first stage."""
    offload: bool = False
    """True if activations are on the host (`train.offload_activations`)."""
    together: bool = False
    """True if the other encoders share their ranks with each other."""

    @property
    def language(self) -> LayoutConfig:
        return self.layouts[LANGUAGE]

    @property
    def apart(self) -> list[str]:
        """Encoders that are not on ranks of the language model."""
        return [name for name in self.layouts if name != LANGUAGE and name not in self.shared]

    @property
    def world_size(self) -> int:
        """Number of ranks of all modules."""
        ranks = [ranks_of(self.layouts[name]) for name in self.apart]
        return ranks_of(self.language) + (max(ranks, default=0) if self.together else sum(ranks))

    def placement(self, cfg: ConfigContainer) -> PlacementConfig:
        """Return the placement of the modules. First ranks are set if no mode implies them, or if the config sets
        others: an override with an empty mapping would keep those."""
        idle, node = self.world_size < self.gpus, cfg.placement.ranks_per_node
        per_node = node if node >= self.gpus and not self.node else self.node
        placement = replace(cfg.placement, first_rank={}, allow_idle=idle, ranks_per_node=per_node)
        if not cfg.placement.first_rank:
            if self.shared and not self.apart:
                return replace(placement, mode="shared")
            if not self.shared and not self.together:
                return replace(placement, mode="disjoint")
        return replace(placement, mode="disjoint", first_rank=self.first_ranks())

    def first_ranks(self) -> dict[str, int]:
        """Return the first rank of each module: separate encoders first (in a row or together), then the language
        model."""
        firsts, following = {}, 0
        for name in self.apart:
            firsts[name] = 0 if self.together else following
            following = max(following, firsts[name] + ranks_of(self.layouts[name]))
        return {name: firsts.get(name, following) for name in self.layouts}

    def config(self, cfg: ConfigContainer) -> ConfigContainer:
        """Return the config with this layout."""
        modules = {name: replace(module, layout=self.layouts[name]) for name, module in cfg.modules.items()}
        return replace(
            cfg,
            modules=modules,
            placement=self.placement(cfg),
            train=replace(
                cfg.train,
                micro_batch_size=self.micro_batch_size,
                recompute=self.recompute,
                offload_activations="layers" if self.offload else "none",
            ),
            optim=replace(cfg.optim, distributed_optimizer=self.distributed_optimizer),
        )

    def run_layout(self, cfg: ConfigContainer) -> RunLayout:
        """Return ranks and edges without processes, for memory estimates."""
        firsts = self.first_ranks()
        modules = {
            name: ModuleLayout(name=name, first_rank=firsts[name], balance=cfg.modules[name].balance, **vars(layout))
            for name, layout in self.layouts.items()
        }
        edges = tuple(
            Edge(source, destination, "shared" if source in self.shared else "disjoint")
            for source, destination in connections(cfg)
        )
        return RunLayout(modules, edges, processes=(), ranks_per_node=self.node)

    def overrides(self, cfg: ConfigContainer) -> list[str]:
        """Return the overrides that select this layout, as arguments of `mimo-train check CONFIG`."""
        chosen = self.config(cfg)
        sections = {
            f"modules.{name}.layout": (module.layout, chosen.modules[name].layout)
            for name, module in cfg.modules.items()
        }
        sections |= {name: (getattr(cfg, name), getattr(chosen, name)) for name in ("placement", "train", "optim")}
        return [
            f"{section}.{field.name}={_as_override(getattr(after, field.name))}"
            for section, (before, after) in sections.items()
            for field in fields(before)
            if getattr(before, field.name) != getattr(after, field.name)
        ]


def _as_override(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)


class FullestRank:
    """Bytes of the fullest rank of candidates. The memory of a stage is computed once."""

    def __init__(self, cfg: ConfigContainer, vocab: int, media: Mapping[str, float]):
        """`vocab`: rows of the embedding; `media`: media items of each encoder in a sample."""
        self._cfg, self._vocab, self._media = cfg, vocab, media
        self._known: dict[Hashable, Memory] = {}

    def __call__(self, candidate: Candidate) -> int:
        """Return the bytes, of the modules that the candidate has."""
        return _fullest(candidate, self._stage)

    def states(self, candidate: Candidate) -> int:
        """Return the bytes without activations: a lower bound for any `train.recompute` and microbatch."""
        return _fullest(candidate, self._state)

    def _state(self, candidate: Candidate, name: str, stage: int) -> Memory:
        layout, divided = candidate.layouts[name], candidate.distributed_optimizer
        key = name, stage, divided, *vars(layout).values()
        if key not in self._known:
            cfg = replace(self._cfg, optim=replace(self._cfg.optim, distributed_optimizer=divided))
            module = ModuleLayout(name=name, first_rank=0, **vars(layout))
            self._known[key] = state_of_stage(cfg, module, stage, self._vocab)
        return self._known[key]

    def _stage(self, candidate: Candidate, name: str, stage: int) -> Memory:
        layout, language = candidate.layouts[name], candidate.language
        if name != LANGUAGE:  # depends only on these sizes of the language model
            language = LayoutConfig(pp=language.pp, dp=language.dp, vpp=language.vpp)
        is_shared = name in candidate.shared
        options = candidate.micro_batch_size, candidate.recompute, candidate.offload, candidate.distributed_optimizer
        key = name, stage, is_shared, *options, *vars(layout).values(), *vars(language).values()
        if key not in self._known:
            layouts = {other: LayoutConfig() for other in self._cfg.encoders} | {LANGUAGE: language, name: layout}
            shared = frozenset(self._cfg.encoders) - (frozenset() if is_shared else {name})
            reduced = replace(candidate, layouts=layouts, shared=shared, together=False)
            cfg = reduced.config(self._cfg)
            run = Run(cfg, reduced.run_layout(cfg), Batch.of(cfg))
            activations = activations_of_stage(run, name, stage, self._vocab, self._media.get(name, 0.0))
            self._known[key] = self._state(candidate, name, stage).with_activations(activations)
        return self._known[key]


def _fullest(candidate: Candidate, of_stage: Callable[[Candidate, str, int], Memory]) -> int:
    """Return the bytes of the fullest rank, from the memory of a stage of a module."""
    last = candidate.language.pp - 1
    # The stages of a language model that differ: the first, the second, the last.
    stages = {stage: of_stage(candidate, LANGUAGE, stage) for stage in {0, min(1, last), last}}
    first = sum((of_stage(candidate, name, 0) for name in candidate.shared), stages[0])
    totals = [first.total, *(memory.total for memory in stages.values())]
    encoders = [
        [of_stage(candidate, name, stage) for stage in {0, candidate.layouts[name].pp - 1}] for name in candidate.apart
    ]
    if candidate.together:
        totals += [sum(memories, Memory()).total for memories in zip(*encoders, strict=True)]
    return max(totals + [memory.total for memories in encoders for memory in memories])
