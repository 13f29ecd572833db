"""Sampling options of an answer, as the command line gives them."""

import math
from dataclasses import dataclass

from mimo_train.config.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Options of drawing the next token, applied in the order `temperature`, `top_k`, `top_p`."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token (greedy), which the other options do not change."""
    top_k: int = 0
    """Number of most likely tokens that can be drawn; 0: all."""
    top_p: float = 1.0
    """The fewest most likely tokens with at least this total probability can be drawn."""
    seed: int | None = None
    """Equal seeds draw equal tokens; None draws other tokens each time."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature: must be 0 or more, is {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"--top-k: must be 0 or more, is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p: must be above 0 and at most 1, is {self.top_p}")
