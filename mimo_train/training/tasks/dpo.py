"""Direct preference optimization."""

import torch

from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.preference import PairTask, logistic_loss


class Dpo(PairTask):
    """DPO (arXiv 2305.18290, equation 7); with `preference.label_smoothing` its conservative form."""

    def compare(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -log sigmoid of the reward margins; a reward is beta x log-ratio."""
        keys = self.cfg.preference
        rewards_NK = keys.beta * answers.log_ratios_NK
        return logistic_loss(rewards_NK[:, 0] - rewards_NK[:, 1], keys.label_smoothing), rewards_NK
