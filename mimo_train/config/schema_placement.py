"""Keys of ranks: `placement`. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.fault import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.schema_modules import MOST_RANKS


@dataclass
class PlacementConfig(Section):
    """Which ranks the modules get."""

    mode: str = key("disjoint", choices=("disjoint", "shared"))
    """`disjoint` (one module after the other) or `shared` (every encoder on the ranks of the language model's first
    stage)."""
    first_rank: dict[str, int] = key(factory=dict, at_most=MOST_RANKS)
    """First rank of each module by name, instead of one after the other: `'placement.first_rank={images: 1, language:
    0}'`. Names every module or none; with mode `disjoint`."""
    allow_idle: bool = False
    """Whether processes may be without a module: those in holes between modules, and those beyond the last one. They
    end at once."""
    ranks_per_node: int = key(0, at_least=0, at_most=MOST_RANKS)
    """Ranks of a node, for `mimo-train check` before there is a launcher; 0: as many as the launcher has started on
    each."""
    tp_across_nodes: bool = False
    """Whether a tensor-parallel group may have ranks on several nodes."""

    def faults(self) -> Iterator[Fault]:
        """Values that cannot be. Ranks and modules are looked at together in `mimo_train.layout.placement`."""
        yield from value_faults(self, "placement")
        for name, rank in self.first_rank.items():
            if rank < 0:
                yield Fault(f"placement.first_rank.{name}", f"must be at least 0, is {rank}")
        if self.first_rank and self.mode == "shared":
            yield Fault(
                "placement.first_rank", "applies to mode disjoint; shared modules all start at rank 0: remove it"
            )
