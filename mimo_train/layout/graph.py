"""The graph of a run's modules: edges from givers to takers of features, disjoint or shared. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer

EdgePlacement = Literal["disjoint", "shared"]
"""disjoint: the giver's last stage sends to the taker's first stage, on other ranks. shared: the giver runs on the
ranks of the taker's first stage, inside its forward pass."""


@dataclass(frozen=True)
class Edge:
    """Features go from the giver to the taker in the forward pass, and their gradients back."""

    giver: str
    taker: str
    placement: EdgePlacement

    @property
    def is_shared(self) -> bool:
        """Whether the giver is on the ranks of the taker's first stage."""
        return self.placement == "shared"


def connections(cfg: ConfigContainer) -> list[tuple[str, str]]:
    """(giver, taker) of every edge, in the order of the config. Every encoder gives to the language model; this is the
    only place that defines it."""
    return [(name, LANGUAGE) for name in cfg.encoders] if LANGUAGE in cfg.modules else []
