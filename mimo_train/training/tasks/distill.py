"""Distillation: the divergence from a teacher's next tokens, and the cross entropy of the labels.

loss = weight * T^2 * KL(teacher || student) + (1 - weight) * cross entropy, with both softmaxes at temperature T; T^2
keeps the size of the gradients (Hinton, Vinyals, Dean 2015, arXiv 1503.02531, section 2).
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo_train.config.schema_mix import source_names
from mimo_train.training.tasks.base import LossOutput, Task
from mimo_train.training.tasks.sft import masked_token_loss


class Distill(Task):
    """Learns a teacher's next tokens at the learned positions, by the mean loss of a token."""

    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Return the loss of a microbatch; `output` [2, B, C] has cross entropy and divergence, see `Lesson`."""
        distill, mask = self.cfg.distill, batch["loss_mask"].float()
        cross_entropy, divergence = output.float()
        losses = distill.weight * distill.temperature**2 * divergence + (1 - distill.weight) * cross_entropy
        names = source_names(self.cfg.data.mix)
        loss, tokens, report = masked_token_loss(mask, losses, sources=batch.get("sources"), names=names)
        report["loss"] = report["lm loss"]
        for name, values in (("kl", divergence), ("lm loss", cross_entropy)):
            report[name] = torch.stack([(values.detach() * mask).sum(), mask.sum()])
        return loss, tokens, report
