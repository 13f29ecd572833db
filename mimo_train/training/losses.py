"""Losses of a microbatch, and their reduction over microbatches and ranks.

Shape suffixes: B batch, S sequence.
"""

import torch
import torch.distributed as dist


def masked_token_loss(
    loss_mask_BS: torch.Tensor, output_tensor_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of the tokens that count.

    Args:
        loss_mask_BS: 1 where a token is learned from, else 0.
        output_tensor_BS: loss per token, in nats.

    Returns:
        (sum of losses, number of tokens as int, {"lm loss": [sum, number]}): the token-aware pattern; the optimizer
        step divides by the tokens of the whole global batch.
    """
    loss_mask = loss_mask_BS.reshape(-1).float()
    loss = torch.sum(output_tensor_BS.reshape(-1).float() * loss_mask)
    num_tokens = loss_mask.sum()
    report = torch.stack([loss.detach(), num_tokens.detach()])
    return loss, num_tokens.to(torch.int), {"lm loss": report}


def reduce_losses(reports: list[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Losses of a step from those of its microbatches, over the data-parallel and context-parallel ranks of `group`.

    A report of two numbers is (sum, count): sums are added, counts are added, and divided once. A report of one number
    is a mean: it is averaged over microbatches and ranks. Collective over the group.
    """
    if not reports:
        return {}
    names = list(reports[0])
    sums = torch.stack([torch.stack([_as_sum_and_count(report[name]) for report in reports]).sum(0) for name in names])
    dist.all_reduce(sums, group=group)
    return {name: sums[index, 0] / sums[index, 1].clamp(min=1) for index, name in enumerate(names)}


def _as_sum_and_count(report: torch.Tensor) -> torch.Tensor:
    report = report.detach().float().reshape(-1)
    if report.numel() == 2:
        return report.double()
    return torch.stack([report[0], torch.ones_like(report[0])]).double()
