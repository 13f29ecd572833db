"""Odds ratio preference optimization, without a reference model."""

import math

import torch
from torch.nn.functional import logsigmoid

from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.preference import PairTask


class Orpo(PairTask):
    """ORPO (arXiv 2403.07691, equations 6 and 7): the chosen answer's negative log-likelihood, and beta x the loss of
    the odds ratio. The likelihood is that of the answer; TRL's includes the prompt."""

    @property
    def sft_weight(self) -> float:
        """The likelihood is part of the method."""
        return 1.0

    def compare(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -beta x log sigmoid(log odds ratio); a reward is beta x mean log-probability of a token."""
        beta, means_NK = self.cfg.preference.beta, answers.means_NK
        log_odds_NK = means_NK - _log_of_rest(means_NK)
        return -beta * logsigmoid(log_odds_NK[:, 0] - log_odds_NK[:, 1]), beta * means_NK


def _log_of_rest(logps: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(logps)), without cancellation for values near 0. A probability of 1 counts as 1 - 1e-7."""
    logps = logps.clamp(max=-1e-7)
    # Both branches are differentiated: keep each away from its pole.
    small, large = logps.clamp(max=-math.log(2)), logps.clamp(min=-math.log(2))
    return torch.where(logps < -math.log(2), torch.log1p(-small.exp()), torch.log(-torch.expm1(large)))
