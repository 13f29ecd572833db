"""Identity preference optimization."""

import torch

from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.preference import PairTask


class Ipo(PairTask):
    """IPO (arXiv 2310.12036, equation 17), with log-ratios as means over tokens, as its authors and TRL have it."""

    def compare(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (difference of mean log-ratios - 1 / (2 beta))^2; a reward is beta x log-ratio."""
        beta, log_ratios_NK = self.cfg.preference.beta, answers.log_ratios_NK
        means_NK = log_ratios_NK / answers.tokens_NK
        return (means_NK[:, 0] - means_NK[:, 1] - 1 / (2 * beta)) ** 2, beta * log_ratios_NK
