"""How an answer is drawn, as the command line gives it. Imports no torch."""

import math
from dataclasses import dataclass

from mimo_train.config.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: `temperature` first, then `top_k`, then `top_p` of what `top_k` left."""

    temperature: float = 0.0
    """What logits are divided by; 0 takes the most likely token (greedy), which the others do not change."""
    top_k: int = 0
    """Only the most likely tokens are drawn, this many of them; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens are drawn, as few as have this probability together."""
    seed: int | None = None
    """The same seed draws the same tokens; None draws others each time."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature: must be 0 or more, is {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"--top-k: must be 0 or more, is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p: must be above 0 and at most 1, is {self.top_p}")
