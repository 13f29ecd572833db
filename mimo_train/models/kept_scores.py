"""Causal attention over short rows on a CPU, which keeps its probabilities for the backward pass.

Torch's fused kernel takes 32 queries of one head at a time, and computes their scores again in the backward pass. Here
those of all heads are one batched product over the keys that they see: 5 to 25 % less time at 64 to 128 positions, 30 %
at 256. Each result is contiguous: others are computed by torch one head after the other.

Shape suffixes: S positions, B batch, N heads, G heads of keys, E heads of one with its queries and its values, D head
dimension, M heads of all rows (B * N), Q queries of a block, K keys that they see.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mimo_train.estimate.activations import BLOCK, KEPT_SCORES


def keeps_scores(query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor) -> bool:
    """Whether `attend_causally` is for such queries, keys and values: in fp32 on a CPU, of as many heads, of neither so
    few positions that it gains nothing nor so many that probabilities are most of what a layer keeps."""
    return _is_short(query_SBND) and query_SBND.shape == key_SBND.shape == value_SBND.shape


def turns_and_keeps_scores(mixed_SBGED: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether `attend_turned` is for them: as `keeps_scores`, each query with a key of its own, whole heads turned."""
    return _is_short(mixed_SBGED) and mixed_SBGED.size(3) == 3 and cos.size(-1) == mixed_SBGED.size(-1)


def _is_short(parts: torch.Tensor) -> bool:
    return (
        parts.device.type == "cpu"
        and parts.dtype == torch.float32
        and len(parts) in KEPT_SCORES
        and not torch.compiler.is_compiling()
    )


def attend_causally(
    query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """softmax(Q K^T * scale) V, [S, B, N * D], of each position over itself and those before it.

    Args:
        scale: None: 1 / sqrt(D).
    """
    scale = query_SBND.size(-1) ** -0.5 if scale is None else scale
    attended: torch.Tensor = _Causal.apply(query_SBND, key_SBND, value_SBND, scale)
    return attended


def attend_turned(mixed_SBGED: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float | None) -> torch.Tensor:
    """`attend_causally` of queries, keys and values that stand beside each other, queries and keys turned.

    Args:
        mixed_SBGED: of each head its query, its key and its value.
        cos: [S, 1 or B, 1, D], of `mimo_train.models.turned_heads`.
        sin: likewise, its first half negated.
        scale: None: 1 / sqrt(D).
    """
    scale = mixed_SBGED.size(-1) ** -0.5 if scale is None else scale
    attended: torch.Tensor = _TurnedCausal.apply(mixed_SBGED, cos, sin, scale)
    return attended


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *parts, scale = given
        positions, rows, heads, width = parts[0].shape
        query_MSD, key_MSD, value_MSD = (part.reshape(positions, -1, width).transpose(0, 1) for part in parts)
        query_MSD = torch.mul(query_MSD, scale, out=query_MSD.new_empty(query_MSD.shape))
        key_MSD, value_MSD = key_MSD.contiguous(), value_MSD.contiguous()
        attended_SMD, kept = _attend(query_MSD, key_MSD, value_MSD)
        ctx.save_for_backward(query_MSD, key_MSD, value_MSD, *kept)
        ctx.shape, ctx.scale = parts[0].shape, scale
        return attended_SMD.view(positions, rows, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_MSD, key_MSD, value_MSD, *kept = ctx.saved_tensors
        found = [torch.empty_like(query_MSD) for _ in range(3)]
        _attend_back(gradients[0], query_MSD, key_MSD, value_MSD, kept, found)
        found[0] *= ctx.scale
        return *(each.transpose(0, 1).view(ctx.shape) for each in found), None


class _TurnedCausal(torch.autograd.Function):
    """Turns, and puts gradients together, where the parts are contiguous; the scale is in the turns of queries."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        mixed_SBGED, cos, sin, scale = given
        positions, rows, heads, _, width = mixed_SBGED.shape
        # Of queries and keys: [2, 1 or B, 1, S, D].
        cos, sin = (torch.stack([each * scale, each]).permute(0, 2, 3, 1, 4).contiguous() for each in (cos, sin))
        parts = mixed_SBGED.permute(3, 1, 2, 0, 4).contiguous()
        _turn(parts[:2], cos, sin)
        found = parts.view(3, -1, positions, width).unbind()
        attended_SMD, kept = _attend(*found)
        ctx.save_for_backward(*found, cos, sin, *kept)
        ctx.shape = mixed_SBGED.shape
        return attended_SMD.view(positions, rows, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_MSD, key_MSD, value_MSD, cos, sin, *kept = ctx.saved_tensors
        positions, rows, heads, _, width = ctx.shape
        parts = query_MSD.new_empty(3, rows, heads, positions, width)
        found = parts.view(3, -1, positions, width).unbind()
        _attend_back(gradients[0], query_MSD, key_MSD, value_MSD, kept, found)
        _turn(parts[:2], cos, sin.roll(width // 2, dims=-1))
        mixed_SBGED = query_MSD.new_empty(ctx.shape)
        mixed_SBGED.permute(3, 1, 2, 0, 4).copy_(parts)
        return mixed_SBGED, None, None, None


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """In place, as `mimo_train.models.turned_heads.turned`."""
    changed = heads.roll(heads.size(-1) // 2, dims=-1)
    heads.mul_(cos).addcmul_(changed, sin)


def _attend(
    query_MSD: torch.Tensor, key_MSD: torch.Tensor, value_MSD: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What queries, which have their scale, see, [S, M, D]; probabilities by block, [M, Q, K]."""
    heads, positions, width = query_MSD.shape
    mask_QQ = query_MSD.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
    attended_SMD = query_MSD.new_empty(positions, heads, width)
    kept = []
    for first in range(0, positions, BLOCK):
        end = min(first + BLOCK, positions)
        scores_MQK = torch.bmm(query_MSD[:, first:end], key_MSD[:, :end].mT)
        scores_MQK[..., first:] += mask_QQ[: end - first, : end - first]
        kept.append(torch.softmax(scores_MQK, -1, out=scores_MQK))
        attended_SMD[first:end] = torch.bmm(kept[-1], value_MSD[:, :end]).transpose(0, 1)
    return attended_SMD, kept


def _attend_back(
    gradient: torch.Tensor,
    query_MSD: torch.Tensor,
    key_MSD: torch.Tensor,
    value_MSD: torch.Tensor,
    kept: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
) -> None:
    """Write the gradients of queries with their scale, keys and values, each [M, S, D], into `found`."""
    to_query, to_key, to_value = found
    positions, width = query_MSD.shape[1:]
    gradient_MSD = gradient.reshape(positions, -1, width).transpose(0, 1).contiguous()
    # The last block sees all keys, and is the first to write their gradients.
    for p_MQK in reversed(kept):
        size, end = p_MQK.shape[1:]
        block, is_first = slice(end - size, end), end == positions
        of_block = gradient_MSD[:, block]
        back_MQK = torch.bmm(of_block, value_MSD[:, :end].mT)
        torch.ops.aten._softmax_backward_data.out(back_MQK, p_MQK, -1, p_MQK.dtype, grad_input=back_MQK)
        to_query[:, block] = torch.bmm(back_MQK, key_MSD[:, :end])
        for own, transposed, inputs in ((to_key, back_MQK, query_MSD[:, block]), (to_value, p_MQK, of_block)):
            if is_first:
                torch.bmm(transposed.mT, inputs, out=own)
            else:
                own[:, :end] += torch.bmm(transposed.mT, inputs)
