"""The interface of a task: the loss of a microbatch.

Shape suffixes: B batch, C positions of this context-parallel rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo_train.config.schema import ConfigContainer

LossOutput = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""(sum of losses, number of units as int, {name: [sum, count]}); see `training.step.losses`."""

LOSS = "loss"
"""Name of the loss in the report of a task other than sft."""

OF_SOURCE = "loss/"
"""Prefix of the losses of a mixture's sources in a report."""


class Task(ABC):
    """What a run learns. Both forward steps return `partial(task, microbatch, groups)` as their loss function.

    A task is built once per process, from the config. What it reads and needs is in `mimo_train.config.tasks`.
    """

    def __init__(self, cfg: ConfigContainer):
        self.cfg = cfg

    def __call__(
        self,
        batch: Mapping[str, Any],
        groups: ProcessGroupCollection,
        output: torch.Tensor,
        non_loss_data: bool = False,
    ) -> Any:
        """Return the loss; with `non_loss_data` {"losses": loss per token, "loss_mask": mask} instead."""
        if non_loss_data:
            return {"losses": output.detach(), "loss_mask": batch["loss_mask"]}
        return self.loss(batch, groups, output)

    @abstractmethod
    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Return the summed loss of a microbatch.

        Args:
            batch: the microbatch. Tensors of tokens (`labels`, `loss_mask`, `sources`, `answers`) are cut to this
                context-parallel rank, [B, C].
            groups: process groups of the language model.
            output: of the language model's last stage: the loss per token [B, C] in nats, or the values of a value
                head.

        Returns:
            This rank's sum, its units (tokens or pairs), and the report. The step divides gradients by the units of the
                global batch, so ranks of one context-parallel group must add up to each unit once.
        """
