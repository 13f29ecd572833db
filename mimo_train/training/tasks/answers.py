"""The answers of a microbatch: their log-probabilities, summed over tokens and context-parallel ranks.

Shape suffixes: B batch, C positions of this context-parallel rank, N samples of a microbatch, K answers of a sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


@dataclass(frozen=True)
class Answers:
    """The answers of a microbatch, over the whole sequences."""

    logps_NK: torch.Tensor
    """Sum of the log-probabilities of each answer's tokens, in nats."""
    tokens_NK: torch.Tensor
    """Number of these tokens, at least 1."""
    reference_NK: torch.Tensor
    """`logps_NK` of the reference model; zeros for tasks without it."""
    targets_N: torch.Tensor
    """`Preference.target`."""
    counts_N: torch.Tensor
    """1 for samples that count, 0 for bad ones and those without a reference value."""
    sources_N: torch.Tensor
    """Index of each sample's source in a mixture, else 0."""

    @property
    def means_NK(self) -> torch.Tensor:
        """Mean log-probability of a token of each answer."""
        return self.logps_NK / self.tokens_NK

    @property
    def log_ratios_NK(self) -> torch.Tensor:
        """Logarithm of the policy's probability over the reference's."""
        return self.logps_NK - self.reference_NK

    @classmethod
    def of(
        cls,
        batch: Mapping[str, Any],
        groups: ProcessGroupCollection,
        losses_BC: torch.Tensor,
        *,
        needs_reference: bool = False,
    ) -> "Answers":
        """Return the answers of a microbatch with the loss per token. Collective over context-parallel ranks.

        Args:
            batch, groups: as in `Task.loss`.
            needs_reference: the microbatch has reference values.
        """
        targets_N, mask_BC = batch["targets"], batch["loss_mask"].float()
        number = 2 * len(targets_N)
        sources_BC = batch.get("sources", torch.zeros_like(mask_BC))
        columns = torch.stack([-losses_BC.float() * mask_BC, mask_BC, sources_BC * mask_BC]).flatten(1)
        places = batch["answers"].reshape(-1)
        # Sums instead of a scatter, whose order of summation is not fixed on CUDA.
        of_answers = [(columns * (places == answer)).sum(1) for answer in range(number)]
        sums = torch.stack(of_answers, dim=1) if number else columns[:, :0]  # a packed row of padding alone
        if number and groups.cp.size() > 1:
            sums = reduce_from_tensor_model_parallel_region(sums, group=groups.cp)  # a rank's gradient is of its part
        logps_NK, tokens_NK, sources_NK = sums.view(len(columns), len(targets_N), 2)
        counts_N, tokens_NK = (tokens_NK > 0).all(dim=1), tokens_NK.detach().clamp(min=1)
        reference_NK = batch["reference"] if needs_reference else torch.zeros_like(tokens_NK)
        counts_N = counts_N & reference_NK.isfinite().all(dim=1)
        return cls(
            logps_NK,
            tokens_NK,
            torch.where(counts_N[:, None], reference_NK, 0.0),
            torch.where(counts_N, targets_N, 0.0),
            counts_N.float(),
            (sources_NK.detach() / tokens_NK)[:, 0].round(),
        )
