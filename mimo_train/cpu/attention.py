"""Rotary causal attention over short rows on a CPU, which keeps its probabilities for the backward pass.

Torch's fused kernel takes 32 queries of one head at a time, and recomputes their scores in the backward pass. Here a
block of queries of all heads is one batched matmul with its keys. All results are contiguous, because torch multiplies
other tensors one head at a time.

Shape suffixes: S positions, B batch, N heads, E a head's query, its key and its value, D head dimension, M heads of all
rows (B * N), Q queries of a block, K keys that they see.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

KEPT_SCORES, BLOCK = range(64, 257), 32
"""Sequence lengths at which attention is computed here, and queries of a block."""


def supports(hidden_SBH: torch.Tensor) -> bool:
    """True if `rotary_attention` supports these hidden states: fp32 on a CPU. Their number of positions must be one at
    which it is faster and its probabilities are a small part of a layer's memory."""
    return (
        hidden_SBH.device.type == "cpu"
        and hidden_SBH.dtype == torch.float32
        and len(hidden_SBH) in KEPT_SCORES
        and not torch.compiler.is_compiling()
    )


def rotary_attention(
    mixed_SBNED: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return softmax(R(Q) R(K)^T * scale) V, [S, B, N * D], of each position over itself and those before it.

    Args:
        mixed_SBNED: queries, keys and values.
        cos: [S, 1 or B, 1, D], of the rotation R (`mimo_train.models.dense_layer.rotate`).
        sin: the same shape, its first half negated.
        scale: None: 1 / sqrt(D).
    """
    scale = mixed_SBNED.size(-1) ** -0.5 if scale is None else scale
    attended: torch.Tensor = _RotaryAttention.apply(mixed_SBNED, cos, sin, scale)
    return attended


class _RotaryAttention(torch.autograd.Function):
    """Rotates and joins gradients where the parts are contiguous. The rotation of the queries includes the scale."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        mixed_SBNED, cos, sin, scale = arguments
        positions, rows, heads, _, width = mixed_SBNED.shape
        # For queries and keys: [2, 1 or B, 1, S, D].
        cos, sin = (torch.stack([each * scale, each]).permute(0, 2, 3, 1, 4).contiguous() for each in (cos, sin))
        parts = mixed_SBNED.permute(3, 1, 2, 0, 4).contiguous()
        _rotate(parts[:2], cos, sin)
        query_MSD, key_MSD, value_MSD = parts.view(3, -1, positions, width).unbind()
        attended_SMD, probabilities = _attend(query_MSD, key_MSD, value_MSD)
        ctx.save_for_backward(query_MSD, key_MSD, value_MSD, cos, sin, *probabilities)
        ctx.shape = mixed_SBNED.shape
        return attended_SMD.view(positions, rows, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_MSD, key_MSD, value_MSD, cos, sin, *probabilities = ctx.saved_tensors
        positions, rows, heads, _, width = ctx.shape
        parts = query_MSD.new_empty(3, rows, heads, positions, width)
        totals = parts.view(3, -1, positions, width).unbind()
        _write_gradients(gradients[0], (query_MSD, key_MSD, value_MSD), probabilities, totals)
        _rotate(parts[:2], cos, sin.roll(width // 2, dims=-1))
        mixed_SBNED = query_MSD.new_empty(ctx.shape)
        mixed_SBNED.permute(3, 1, 2, 0, 4).copy_(parts)
        return mixed_SBNED, None, None, None


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    swapped = heads.roll(heads.size(-1) // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def _attend(
    query_MSD: torch.Tensor, key_MSD: torch.Tensor, value_MSD: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the attended values [S, M, D] of scaled queries, and the probabilities of each block, [M, Q, K]."""
    heads, positions, width = query_MSD.shape
    mask_QQ = query_MSD.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
    attended_SMD = query_MSD.new_empty(positions, heads, width)
    probabilities = []
    for first in range(0, positions, BLOCK):
        end = min(first + BLOCK, positions)
        scores_MQK = torch.bmm(query_MSD[:, first:end], key_MSD[:, :end].mT)
        scores_MQK[..., first:] += mask_QQ[: end - first, : end - first]
        probabilities.append(torch.softmax(scores_MQK, -1, out=scores_MQK))
        attended_SMD[first:end] = torch.bmm(probabilities[-1], value_MSD[:, :end]).transpose(0, 1)
    return attended_SMD, probabilities


def _write_gradients(
    gradient: torch.Tensor,
    inputs_MSD: Sequence[torch.Tensor],
    probabilities: Sequence[torch.Tensor],
    totals_MSD: Sequence[torch.Tensor],
) -> None:
    """Write the gradients of scaled queries, keys and values into `totals_MSD`, from the gradient of the output."""
    query_MSD, key_MSD, value_MSD = inputs_MSD
    to_query, to_key, to_value = totals_MSD
    positions, width = query_MSD.shape[1:]
    gradient_MSD = gradient.reshape(positions, -1, width).transpose(0, 1).contiguous()
    # The last block sees all keys, and is the first to write their gradients.
    for p_MQK in reversed(probabilities):
        size, end = p_MQK.shape[1:]
        block, is_last = slice(end - size, end), end == positions
        gradient_MQD = gradient_MSD[:, block]
        scores_MQK = torch.bmm(gradient_MQD, value_MSD[:, :end].mT)
        torch.ops.aten._softmax_backward_data.out(scores_MQK, p_MQK, -1, p_MQK.dtype, grad_input=scores_MQK)
        to_query[:, block] = torch.bmm(scores_MQK, key_MSD[:, :end])
        products = ((to_key, scores_MQK, query_MSD[:, block]), (to_value, p_MQK, gradient_MQD))
        for total, weights_MQK, vectors_MQD in products:
            if is_last:
                torch.bmm(weights_MQK.mT, vectors_MQD, out=total)
            else:
                total[:, :end] += torch.bmm(weights_MQK.mT, vectors_MQD)
