"""A candidate layout: its config, and the memory of its fullest rank."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from typing import Any

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_run import PlacementConfig
from mimo_train.estimate.memory import Memory, memory_of_stage
from mimo_train.layout.batch import Batch
from mimo_train.layout.placement import Edge, connections
from mimo_train.layout.ranks import ModuleLayout, RunLayout, lay_out
from mimo_train.layout.run import Run
from mimo_train.preflight.plan.space import LanguageOption


def ranks_of(layout: LayoutConfig) -> int:
    return layout.tp * layout.cp * layout.dp * layout.pp


@dataclass(frozen=True)
class Candidate:
    """Parallel sizes and placement of every module."""

    layouts: Mapping[str, LayoutConfig]
    shared: frozenset[str]
    """Encoders on the ranks of the language model's first stage."""
    together: bool
    """True if the other encoders share their ranks with each other."""
    micro_batch_size: int
    recompute: str
    """`train.recompute`."""
    distributed_optimizer: bool
    node: int
    """GPUs of a node; 0: all are on one node."""
    gpus: int

    @classmethod
    def of(cls, cfg: ConfigContainer, node: int) -> "Candidate | None":
        """Return the layout of a config without faults, on nodes of `node` GPUs. None if only some encoders with ranks
        of their own share them, which a candidate cannot express."""
        layout = lay_out(cfg)
        shared = frozenset(edge.source for edge in layout.shared_edges)
        apart = [layout.modules[name].first_rank for name in cfg.encoders if name not in shared]
        together = len(apart) > 1 and len(set(apart)) == 1
        if not together and len(set(apart)) < len(apart):
            return None
        gpus = layout.processes[-1] + 1
        return cls(
            {name: module.layout for name, module in cfg.modules.items()},
            shared,
            together,
            cfg.train.micro_batch_size,
            cfg.train.recompute,
            cfg.optim.distributed_optimizer,
            node if gpus > node else 0,
            gpus,
        )

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

    @property
    def kind(self) -> Hashable:
        """A key that is equal for candidates that differ only in the sizes of encoders."""
        language = astuple(self.language), self.micro_batch_size, self.recompute, self.distributed_optimizer
        return (*language, self.shared, self.together)

    def placement(self, cfg: ConfigContainer) -> PlacementConfig:
        """Return the placement of the modules. First ranks are set if no mode implies them, or if the config sets
        others: an override with an empty mapping would keep those."""
        idle, node = self.world_size < self.gpus, cfg.placement.ranks_per_node
        kept = replace(
            cfg.placement,
            first_rank={},
            allow_idle=idle,
            ranks_per_node=node if node >= self.gpus and not self.node else self.node,
        )
        if cfg.placement.first_rank:
            return replace(kept, mode="disjoint", first_rank=self.first_ranks())
        if self.shared and not self.apart:
            return replace(kept, mode="shared")
        if not self.shared and not self.together:
            return replace(kept, mode="disjoint")
        return replace(kept, mode="disjoint", first_rank=self.first_ranks())

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
            train=replace(cfg.train, micro_batch_size=self.micro_batch_size, recompute=self.recompute),
            optim=replace(cfg.optim, distributed_optimizer=self.distributed_optimizer),
        )

    def run_layout(self, cfg: ConfigContainer) -> RunLayout:
        """Return ranks and edges without nodes, for memory estimates."""
        firsts, modules = self.first_ranks(), {}
        for name, sizes in self.layouts.items():
            axes = {axis.name: getattr(sizes, axis.name) for axis in fields(LayoutConfig)}
            modules[name] = ModuleLayout(name=name, first_rank=firsts[name], balance=cfg.modules[name].balance, **axes)
        edges = tuple(
            Edge(source, destination, "shared" if source in self.shared else "disjoint")
            for source, destination in connections(cfg)
        )
        return RunLayout(modules, edges, processes=(), ranks_per_node=self.node)

    def overrides(self, cfg: ConfigContainer) -> list[str]:
        """Return the overrides that select this layout, as arguments of `mimo-train check CONFIG`."""
        changes = []
        chosen = self.config(cfg)
        for name in cfg.modules:
            before, after = cfg.modules[name].layout, chosen.modules[name].layout
            for axis in fields(LayoutConfig):
                if getattr(before, axis.name) != getattr(after, axis.name):
                    changes.append(f"modules.{name}.layout.{axis.name}={_written(getattr(after, axis.name))}")
        for section in ("placement", "train", "optim"):
            before, after = getattr(cfg, section), getattr(chosen, section)
            for field in fields(before):
                value = getattr(after, field.name)
                if getattr(before, field.name) != value:
                    changes.append(f"{section}.{field.name}={_written(value)}")
        return changes


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return str(value)


class Fullest:
    """Bytes of the fullest rank of candidates, with shared parts computed once; `least`: the smallest so far."""

    def __init__(
        self,
        cfg: ConfigContainer,
        vocab: int,
        media: Mapping[str, float],
        candidate: Callable[[LanguageOption, Mapping[str, LayoutConfig], frozenset[str]], Candidate],
    ):
        """`vocab`: rows of the embedding; `media`: media items of each encoder in a sample; `candidate`: makes a
        candidate from a language model, encoders, and the names of the encoders that share its ranks."""
        self._cfg, self._vocab, self._media, self._candidate = cfg, vocab, media, candidate
        self._memory = cache(self._memory_of)
        self.least = math.inf

    def of_language(self, option: LanguageOption) -> int:
        """Return the bytes of the fullest rank of the language model without encoders."""
        most = max(self._language(option, stage).total for stage in _stages(option.pp))
        self.least = min(self.least, most)
        return most

    def of(self, candidate: Candidate, option: LanguageOption) -> int:
        """Return the bytes of the fullest rank of a candidate."""
        of_encoders = {
            name: [self._encoder(candidate, name, stage) for stage in {0, layout.pp - 1}]
            for name, layout in candidate.layouts.items()
            if name != LANGUAGE
        }
        first = sum((of_encoders[name][0] for name in candidate.shared), self._language(option, 0))
        totals = [first.total, *(self._language(option, stage).total for stage in _stages(option.pp))]
        if candidate.together:
            pairs = zip(*(of_encoders[name] for name in candidate.apart), strict=True)
            totals += [sum(each, Memory()).total for each in pairs]
        else:
            totals += [memory.total for name in candidate.apart for memory in of_encoders[name]]
        most = max(totals)
        self.least = min(self.least, most)
        return most

    def _language(self, option: LanguageOption, stage: int) -> Memory:
        return self._memory(LANGUAGE, option, None, True, stage)

    def _encoder(self, candidate: Candidate, name: str, stage: int) -> Memory:
        layout = candidate.layouts[name]
        sizes = layout.tp, layout.pp, layout.dp
        language, samples = candidate.language, candidate.micro_batch_size
        # The memory of an encoder depends only on these sizes of the language model.
        option = LanguageOption(
            1, language.pp, 1, language.dp, 1, 1, 1, False, samples, candidate.recompute,
            candidate.distributed_optimizer,
        )  # fmt: skip
        return self._memory(name, option, sizes, name in candidate.shared, stage)

    def _memory_of(
        self, name: str, option: LanguageOption, sizes: tuple[int, int, int] | None, shared: bool, stage: int
    ) -> Memory:
        others = {one: LayoutConfig() for one in self._cfg.encoders}
        if sizes is not None:
            others[name] = LayoutConfig(tp=sizes[0], pp=sizes[1], dp=sizes[2])
        inside = frozenset(others) if shared else frozenset(others) - {name}
        candidate = self._candidate(option, others, inside)
        cfg = candidate.config(self._cfg)
        run = Run(cfg, candidate.run_layout(cfg), Batch.of(cfg))
        media = self._media.get(name, 0.0)
        return memory_of_stage(run, name, stage, self._vocab, media)


def _stages(stages: int) -> set[int]:
    """Return the stages that differ in memory: the first, the second, the last."""
    return {0, min(1, stages - 1), stages - 1}
