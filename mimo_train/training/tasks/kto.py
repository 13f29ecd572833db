"""Kahneman-Tversky optimization: learns from single answers that are labelled desirable or not."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo_train.training.tasks.answers import Answers
from mimo_train.training.tasks.preference import PreferenceTask, Report


class Kto(PreferenceTask):
    """KTO (arXiv 2402.01306, equation 8). The second answer of a sample is another sample's, for the KL term: the
    mean log-ratio of these answers over the microbatch of all data-parallel ranks, at least 0, without gradient."""

    def losses(self, answers: Answers, groups: ProcessGroupCollection) -> tuple[torch.Tensor, Report]:
        """Return weight x (1 - sigmoid(+-(reward - beta x KL))), + for desirable answers; a reward is beta x log-ratio.
        Collective over data-parallel ranks."""
        keys, counts_N = self.cfg.preference, answers.counts_N
        log_ratios, mismatched = answers.log_ratios_NK.unbind(1)
        total = torch.stack([(mismatched.detach() * counts_N).sum(), counts_N.sum()])
        if groups.dp.size() > 1:
            dist.all_reduce(total, group=groups.dp)
        divergence = (total[0] / total[1].clamp(min=1)).clamp(min=0)
        desirable = answers.targets_N
        margins = (log_ratios - divergence) * (2 * desirable - 1)
        weights = torch.where(desirable > 0, keys.desirable_weight, keys.undesirable_weight)
        rewards, chosen, rejected = keys.beta * log_ratios, counts_N * desirable, counts_N * (1 - desirable)
        return weights * (1 - torch.sigmoid(keys.beta * margins)), {
            "rewards/chosen": (rewards, chosen),
            "rewards/rejected": (rewards, rejected),
            "logps/chosen": (answers.logps_NK[:, 0], chosen),
            "logps/rejected": (answers.logps_NK[:, 0], rejected),
            "kl": (divergence.expand_as(counts_N), counts_N),
        }
