"""Supervised fine-tuning: cross entropy of the learned tokens.

Shape suffixes: B batch, S sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from mimo_train.config.schema_mix import source_names
from mimo_train.training.tasks.base import OF_SOURCE, LossOutput, Task


class Sft(Task):
    """Learns the tokens with loss, by their mean cross entropy."""

    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Return `masked_token_loss` of the microbatch."""
        names = source_names(self.cfg.data.mix)
        return masked_token_loss(batch["loss_mask"], output, sources=batch.get("sources"), names=names)


def masked_token_loss(
    loss_mask: torch.Tensor,
    output_tensor: torch.Tensor,
    *,
    sources: torch.Tensor | None = None,
    names: Sequence[str] = (),
    non_loss_data: bool = False,
) -> Any:
    """Sum the losses of the tokens that count. All tensors are [B, S].

    Args:
        loss_mask: 1 where a token is learned from, else 0.
        output_tensor: loss per token, in nats.
        sources: index into `names` of each token's source; None without a mixture.
        non_loss_data: return {"losses": loss per token, "loss_mask": `loss_mask`} instead, for a
            `process_non_loss_data_func`.

    Returns:
        (sum of losses, number of tokens as int, {"lm loss": [sum, number]}), with `loss/NAME` of every source. The
            step divides gradients by the tokens of the global batch, see `divide_gradients`.
    """
    if non_loss_data:
        return {"losses": output_tensor.detach(), "loss_mask": loss_mask}
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output_tensor.reshape(-1).float() * mask)
    num_tokens = mask.sum()
    report = {"lm loss": torch.stack([loss.detach(), num_tokens])}
    if sources is not None:
        losses = torch.stack([output_tensor.detach().reshape(-1).float() * mask, mask])
        for number, name in enumerate(names):
            # A sum instead of a scatter, whose order of summation is not fixed on CUDA.
            report[f"{OF_SOURCE}{name}"] = (losses * (sources.reshape(-1) == number)).sum(1)
    return loss, num_tokens.to(torch.int), report
