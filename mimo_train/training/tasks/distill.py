"""Distillation: the divergence from a teacher's next tokens, and the cross entropy of the labels.

loss = weight * T^2 * KL(teacher || student) + (1 - weight) * cross entropy, with both softmaxes at temperature T; T^2
keeps the size of the gradients (Hinton, Vinyals, Dean 2015, arXiv 1503.02531, section 2).
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo_train.training.tasks.base import LossOutput, Task


class Distill(Task):
    """Learns a teacher's next tokens at the learned positions, by the mean loss of a token."""

    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Return the loss of a microbatch; `output` [2, B, C] has cross entropy and divergence, see `Lesson`."""
        distill, mask = self.cfg.distill, batch["loss_mask"].float()
        cross_entropy, divergence = (output.float() * mask).flatten(1).sum(1)
        loss = distill.weight * distill.temperature**2 * divergence + (1 - distill.weight) * cross_entropy
        sums = {"loss": loss, "kl": divergence, "lm loss": cross_entropy}
        tokens = mask.sum()
        return loss, tokens.to(torch.int), {name: torch.stack([sum_.detach(), tokens]) for name, sum_ in sums.items()}
