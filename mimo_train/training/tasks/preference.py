"""What the tasks that compare answers share: sums over samples, and the report.

Shape suffixes: N samples of a microbatch, K answers of a sample.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn.functional import logsigmoid

from mimo_train.config.schema_mix import source_names
from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.base import LOSS, OF_SOURCE, LossOutput, Task

Report = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Values to report by name: (values [N], their weights [N])."""


class PreferenceTask(Task):
    """Learns from samples of several answers. The loss is the mean over samples of `losses`, at any layout."""

    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Return the sum over the samples of this rank, and their number."""
        answers = self.answers(batch, groups, output)
        counts_N = answers.counts_N
        losses_N, report = self.losses(answers, groups)
        report[LOSS] = losses_N, counts_N
        names = source_names(self.cfg.data.mix) if "sources" in batch else ()  # a held-out set is of none
        for number, name in enumerate(names):
            report[f"{OF_SOURCE}{name}"] = losses_N, counts_N * (answers.sources_N == number)
        total = (losses_N * counts_N).sum()
        # Context-parallel ranks have the same values, and each has the gradient of its part: the first one counts.
        is_first = groups.cp.rank() == 0
        sums = {
            name: is_first * torch.stack([(values * weights).sum(), weights.sum()]).detach()
            for name, (values, weights) in report.items()
        }
        return total if is_first else total - total.detach(), (is_first * counts_N.sum()).to(torch.int), sums

    def answers(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> Answers:
        """Return the answers of a microbatch. See `loss` for the arguments."""
        return Answers.of(batch, groups, output, needs_reference=self.cfg.traits.needs_reference)

    @abstractmethod
    def losses(self, answers: Answers, groups: ProcessGroupCollection) -> tuple[torch.Tensor, Report]:
        """Return the loss of each sample [N], and the values to report. `groups`: as in `Task.loss`."""


class PairTask(PreferenceTask):
    """Learns to prefer the chosen answer of a pair to the rejected one."""

    @property
    def sft_weight(self) -> float:
        """Weight of the chosen answer's mean negative log-likelihood in the loss."""
        return self.cfg.preference.sft_weight

    def losses(self, answers: Answers, groups: ProcessGroupCollection) -> tuple[torch.Tensor, Report]:
        """Return the losses, and rewards and log-probabilities by TRL's names."""
        losses_N, rewards_NK = self.compare(answers)
        logps_NK = answers.logps_NK
        values = of_rewards(rewards_NK) | {"logps/chosen": logps_NK[:, 0], "logps/rejected": logps_NK[:, 1]}
        if self.sft_weight:
            values["nll_loss"] = -answers.means_NK[:, 0]
            losses_N = losses_N + self.sft_weight * values["nll_loss"]
        return losses_N, {name: (value, answers.counts_N) for name, value in values.items()}

    @abstractmethod
    def compare(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each pair [N], and the rewards of its answers [N, K]."""


def of_rewards(rewards_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is reported of the rewards of pairs, [N] by TRL's names."""
    chosen, rejected = rewards_NK.unbind(1)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }


def logistic_loss(margins: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return -log sigmoid of the margins, for labels that are wrong with probability `label_smoothing`."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
