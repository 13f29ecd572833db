"""The graph of a run's modules: edges from sources to destinations of features, disjoint or shared. Imports no
torch."""

from dataclasses import dataclass
from typing import Literal

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer

EdgePlacement = Literal["disjoint", "shared"]
"""disjoint: the source's last stage sends to the destination's first stage, on other ranks. shared: the source runs on
the ranks of the destination's first stage, inside its forward pass."""


@dataclass(frozen=True)
class Edge:
    """Features go from the source to the destination in the forward pass, and their gradients back."""

    source: str
    destination: str
    placement: EdgePlacement

    @property
    def is_shared(self) -> bool:
        """Whether the source is on the ranks of the destination's first stage."""
        return self.placement == "shared"


def connections(cfg: ConfigContainer) -> list[tuple[str, str]]:
    """(source, destination) of every edge, in the order of the config. Every encoder gives to the language model; this
    is the only place that defines it."""
    return [(name, LANGUAGE) for name in cfg.encoders] if LANGUAGE in cfg.modules else []
