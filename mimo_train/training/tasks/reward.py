"""Reward models: a value head scores each answer at its last token.

Shape suffixes: B batch, S sequence, C positions of this context-parallel rank, N samples of a microbatch, K answers of
a sample, A = N K answers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch.nn.functional import logsigmoid

from mimo_train.parallel.context import own_part
from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.preference import PreferenceTask, Report, of_rewards


class Reward(PreferenceTask):
    """Bradley-Terry model (arXiv 2203.02155, equation 1) with the margin of a pair (arXiv 2307.09288, equation 2)."""

    def answers(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> Answers:
        """Return the answers with their rewards in place of log-probabilities."""
        answers = super().answers(batch, groups, output)
        return replace(answers, logps_NK=_last_values(batch, groups, output).view_as(answers.logps_NK))

    def losses(self, answers: Answers, groups: ProcessGroupCollection) -> tuple[torch.Tensor, Report]:
        """Return -log sigmoid of (difference of rewards - margin), and rewards by TRL's names."""
        rewards_NK = answers.logps_NK
        chosen, rejected = rewards_NK.unbind(1)
        losses_N = -logsigmoid(chosen - rejected - answers.targets_N.nan_to_num(0.0))
        if weight := self.cfg.preference.center_rewards:
            losses_N = losses_N + weight * (chosen + rejected) ** 2
        return losses_N, {name: (value, answers.counts_N) for name, value in of_rewards(rewards_NK).items()}


def _last_values(batch: Mapping[str, Any], groups: ProcessGroupCollection, values_BC: torch.Tensor) -> torch.Tensor:
    """Return the value of each answer's last token, [A], as classes of transformers take it: for chat templates that
    write something after an answer, such as a line break, it is the last of these tokens. Collective over
    context-parallel ranks."""
    batch_size, length = values_BC.size(0), values_BC.size(1) * groups.cp.size()
    ends = torch.tensor(batch.get("documents") or batch["lengths"])[: 2 * len(batch["targets"])]
    if "documents" not in batch:
        ends = ends + torch.arange(batch_size) * length
    offsets_BS = torch.arange(batch_size * length, device=values_BC.device).view(batch_size, length)
    offsets_BC = own_part({"offsets": offsets_BS}, groups.cp)["offsets"]
    is_last = offsets_BC.reshape(1, -1) == ends.to(values_BC.device)[:, None] - 1
    # A sum instead of a selection: the last token may be on another context-parallel rank.
    rewards_A = (values_BC.reshape(1, -1).float() * is_last).sum(1)
    if len(rewards_A) and groups.cp.size() > 1:
        rewards_A = reduce_from_tensor_model_parallel_region(rewards_A, group=groups.cp)  # gradients are of own parts
    return rewards_A
