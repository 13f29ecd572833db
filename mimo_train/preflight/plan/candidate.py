"""A layout that may be proposed: what of a config it changes. Imports no torch."""

from collections.abc import Hashable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_run import PlacementConfig
from mimo_train.layout.placement import Edge, connections
from mimo_train.layout.ranks import ModuleLayout, RunLayout, lay_out


def ranks_of(layout: LayoutConfig) -> int:
    """Ranks of a module."""
    return layout.tp * layout.cp * layout.dp * layout.pp


@dataclass(frozen=True)
class Candidate:
    """Parallel sizes of every module, and where it is."""

    layouts: Mapping[str, LayoutConfig]
    shared: frozenset[str]
    """Encoders on the ranks of the language model's first stage."""
    together: bool
    """Whether the other encoders are on the same ranks as each other."""
    micro_batch_size: int
    recompute: str
    """`train.recompute`."""
    distributed_optimizer: bool
    node: int
    """GPUs of a node; 0: all are on one."""
    gpus: int
    """That there are."""

    @classmethod
    def of(cls, cfg: ConfigContainer, node: int) -> "Candidate | None":
        """The layout that a config without faults has, on nodes of `node` GPUs. None: of the encoders on other ranks
        than the language model's some share these with each other and some do not, which no candidate has."""
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
        """The layout of the language model."""
        return self.layouts[LANGUAGE]

    @property
    def apart(self) -> list[str]:
        """Encoders on ranks of their own."""
        return [name for name in self.layouts if name != LANGUAGE and name not in self.shared]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        own = [ranks_of(self.layouts[name]) for name in self.apart]
        return ranks_of(self.language) + (max(own, default=0) if self.together else sum(own))

    @property
    def kind(self) -> Hashable:
        """What those have in common that differ in the sizes of encoders alone."""
        own = astuple(self.language), self.micro_batch_size, self.recompute, self.distributed_optimizer
        return (*own, self.shared, self.together)

    def placement(self, cfg: ConfigContainer) -> PlacementConfig:
        """Where the modules are; first ranks are named where neither mode says it, or where the config names others: an
        override that is an empty mapping would leave those."""
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
        """Encoders that are apart, one after the other or together, then the language model with the others."""
        firsts, following = {}, 0
        for name in self.apart:
            firsts[name] = 0 if self.together else following
            following = max(following, firsts[name] + ranks_of(self.layouts[name]))
        return {name: firsts.get(name, following) for name in self.layouts}

    def config(self, cfg: ConfigContainer) -> ConfigContainer:
        """The config with this layout."""
        modules = {name: replace(module, layout=self.layouts[name]) for name, module in cfg.modules.items()}
        return replace(
            cfg,
            modules=modules,
            placement=self.placement(cfg),
            train=replace(cfg.train, micro_batch_size=self.micro_batch_size, recompute=self.recompute),
            optim=replace(cfg.optim, distributed_optimizer=self.distributed_optimizer),
        )

    def run_layout(self, cfg: ConfigContainer) -> RunLayout:
        """Its ranks and edges, without a look at nodes: for the arithmetic of memory."""
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
        """Changes of the config that choose it, as they are written behind `mimo-train check CONFIG`."""
        found = []
        chosen = self.config(cfg)
        for name in cfg.modules:
            before, after = cfg.modules[name].layout, chosen.modules[name].layout
            for axis in fields(LayoutConfig):
                if getattr(before, axis.name) != getattr(after, axis.name):
                    found.append(f"modules.{name}.layout.{axis.name}={_written(getattr(after, axis.name))}")
        for section in ("placement", "train", "optim"):
            before, after = getattr(cfg, section), getattr(chosen, section)
            for one in fields(before):
                value = getattr(after, one.name)
                if getattr(before, one.name) != value:
                    found.append(f"{section}.{one.name}={_written(value)}")
        return found


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return str(value)
