"""Causal attention over short rows on a CPU, which keeps its probabilities for the backward pass.

Torch's fused kernel takes 32 queries of one head at a time, and computes their scores again in the backward pass. Here
64 queries of all heads are one batched product over the keys that they see: 10 to 25 % less time at 128 positions.

Shape suffixes: S positions, B batch, N heads, D head dimension, M heads of all rows (B * N), Q queries of a block, K
keys that they see.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mimo_train.plan.activations import BLOCK, KEPT_SCORES


def keeps_scores(query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor) -> bool:
    """Whether `attend_causally` is for such queries, keys and values: in fp32 on a CPU, of as many heads, of neither so
    few positions that it gains nothing nor so many that probabilities are most of what a layer keeps."""
    return (
        query_SBND.device.type == "cpu"
        and query_SBND.dtype == torch.float32
        and query_SBND.shape == key_SBND.shape == value_SBND.shape
        and len(query_SBND) in KEPT_SCORES
        and not torch.compiler.is_compiling()
    )


def attend_causally(
    query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """softmax(Q K^T * scale) V, [S, B, N * D], of each position over itself and those before it.

    Args:
        scale: None: 1 / sqrt(D).
    """
    attended: torch.Tensor = _Causal.apply(
        query_SBND, key_SBND, value_SBND, query_SBND.size(-1) ** -0.5 if scale is None else scale
    )
    return attended


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *parts, scale = given
        positions, rows, heads, width = parts[0].shape
        query_MSD, key_MSD, value_MSD = (part.reshape(positions, -1, width).transpose(0, 1) for part in parts)
        # Its last rows and columns are the mask of every block.
        mask_QS = query_MSD.new_full((BLOCK, positions), float("-inf")).triu_(positions - BLOCK + 1)
        attended = query_MSD.new_empty(positions, rows * heads, width)
        kept = []
        for first in range(0, positions, BLOCK):
            end = min(first + BLOCK, positions)
            mask_QK = mask_QS[first - end :, positions - end :]
            scores_MQK = torch.baddbmm(mask_QK, query_MSD[:, first:end], key_MSD[:, :end].mT, alpha=scale)
            kept.append(torch.softmax(scores_MQK, -1, out=scores_MQK))
            torch.bmm(kept[-1], value_MSD[:, :end], out=attended[first:end].transpose(0, 1))
        ctx.save_for_backward(query_MSD, key_MSD, value_MSD, *kept)
        ctx.shape, ctx.scale = parts[0].shape, scale
        return attended.view(positions, rows, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_MSD, key_MSD, value_MSD, *kept = ctx.saved_tensors
        positions, rows, heads, width = ctx.shape
        gradient_MSD = gradients[0].reshape(positions, -1, width).transpose(0, 1)
        found = [query_MSD.new_empty(positions, rows * heads, width) for _ in range(3)]
        to_query, to_key, to_value = (each.transpose(0, 1) for each in found)
        # The last block sees all keys, and is the first to write their gradients.
        for p_MQK in reversed(kept):
            size, end = p_MQK.shape[1:]
            block, added = slice(end - size, end), float(end < positions)
            to_value[:, :end].baddbmm_(p_MQK.mT, gradient_MSD[:, block], beta=added)
            back_MQK = torch.bmm(gradient_MSD[:, block], value_MSD[:, :end].mT)
            torch.ops.aten._softmax_backward_data.out(back_MQK, p_MQK, -1, p_MQK.dtype, grad_input=back_MQK)
            to_query[:, block].baddbmm_(back_MQK, key_MSD[:, :end], beta=0, alpha=ctx.scale)
            to_key[:, :end].baddbmm_(back_MQK.mT, query_MSD[:, block], beta=added, alpha=ctx.scale)
        return *(each.view(ctx.shape) for each in found), None
