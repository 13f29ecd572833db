"""Simple preference optimization, without a reference model."""

import torch

from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.preference import PairTask, logistic_loss


class Simpo(PairTask):
    """SimPO (arXiv 2405.14734, equation 6)."""

    def compare(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -log sigmoid(reward margin - gamma); a reward is beta x mean log-probability of a token."""
        keys = self.cfg.preference
        rewards_NK = keys.beta * answers.means_NK
        margins = rewards_NK[:, 0] - rewards_NK[:, 1] - keys.gamma
        return logistic_loss(margins, keys.label_smoothing), rewards_NK
