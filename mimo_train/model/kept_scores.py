"""Causal attention over short rows on a CPU, which keeps its probabilities for the backward pass.

Torch's fused kernel takes 32 queries of one head at a time, and computes their scores again in the backward pass. Here
those of all heads are one batched product over the keys that they see: 5 to 25 % less time at 64 to 128 positions, 30 %
at 256. Each result is contiguous: others are computed by torch one head after the other.

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
        query_MSD = torch.mul(query_MSD, scale, out=query_MSD.new_empty(query_MSD.shape))
        key_MSD, value_MSD = key_MSD.contiguous(), value_MSD.contiguous()
        mask_QQ = query_MSD.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
        attended_SMD = query_MSD.new_empty(positions, rows * heads, width)
        kept = []
        for first in range(0, positions, BLOCK):
            end = min(first + BLOCK, positions)
            scores_MQK = torch.bmm(query_MSD[:, first:end], key_MSD[:, :end].mT)
            scores_MQK[..., first:] += mask_QQ[: end - first, : end - first]
            kept.append(torch.softmax(scores_MQK, -1, out=scores_MQK))
            attended_SMD[first:end] = torch.bmm(kept[-1], value_MSD[:, :end]).transpose(0, 1)
        ctx.save_for_backward(query_MSD, key_MSD, value_MSD, *kept)
        ctx.shape, ctx.scale = parts[0].shape, scale
        return attended_SMD.view(positions, rows, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_MSD, key_MSD, value_MSD, *kept = ctx.saved_tensors
        positions, width = query_MSD.shape[1:]
        gradient_MSD = gradients[0].reshape(positions, -1, width).transpose(0, 1).contiguous()
        to_query, to_key, to_value = (torch.empty_like(query_MSD) for _ in range(3))
        # The last block sees all keys, and is the first to write their gradients.
        for p_MQK in reversed(kept):
            size, end = p_MQK.shape[1:]
            block, is_first = slice(end - size, end), end == positions
            of_block = gradient_MSD[:, block]
            back_MQK = torch.bmm(of_block, value_MSD[:, :end].mT)
            torch.ops.aten._softmax_backward_data.out(back_MQK, p_MQK, -1, p_MQK.dtype, grad_input=back_MQK)
            torch.mul(torch.bmm(back_MQK, key_MSD[:, :end]), ctx.scale, out=to_query[:, block])
            for found, transposed, inputs in ((to_key, back_MQK, query_MSD[:, block]), (to_value, p_MQK, of_block)):
                if is_first:
                    torch.bmm(transposed.mT, inputs, out=found)
                else:
                    found[:, :end] += torch.bmm(transposed.mT, inputs)
        return *(each.transpose(0, 1).view(ctx.shape) for each in (to_query, to_key, to_value)), None
