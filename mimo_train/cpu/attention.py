"""Rotary causal attention over short rows on a CPU, which keeps its probabilities for the backward pass.

Torch's fused kernel takes 32 queries of one head at a time, and recomputes their scores in the backward pass. Here a
block of queries of all heads is one batched matmul with its keys; the queries of a key head are rows of one matrix.
Every matrix is contiguous, because torch multiplies others one head at a time.

Shape suffixes: S positions, B batch, G key heads, E queries of a key head at a position, P the same with its key and
its value, D head dimension, M key heads of all rows (B * G), Q queries of a key head (S * E), R those of a block, K
keys that a block sees.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

KEPT_SCORES, BLOCK = range(56, 257), 32
"""Sequence lengths at which attention is computed here, and positions of a block."""


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
    mixed_SBGPD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return softmax(R(Q) R(K)^T * scale) V, [S, B, G * E * D], of each position over itself and those before it.

    Args:
        mixed_SBGPD: for each key head its queries, its key and its value.
        cos: [S, 1 or B, 1, D], of the rotation R (`mimo_train.models.dense_layer.rotate`).
        sin: the same shape, its first half negated.
        scale: None: 1 / sqrt(D).
    """
    scale = mixed_SBGPD.size(-1) ** -0.5 if scale is None else scale
    attended: torch.Tensor = _RotaryAttention.apply(mixed_SBGPD, cos, sin, scale)
    return attended


class _RotaryAttention(torch.autograd.Function):
    """Rotates and joins gradients where the parts are contiguous. The rotations of queries and of keys each include the
    square root of the scale."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        mixed_SBGPD, cos, sin, scale = arguments
        # [1 or B, 1, S, 1, D].
        rotation = [(each * scale**0.5).permute(1, 2, 0, 3).unsqueeze(3).contiguous() for each in (cos, sin)]
        sections = [section.contiguous() for section in _sections(mixed_SBGPD)]
        _rotate(sections, *rotation)
        matrices = _matrices(sections)
        attended_SMED, probabilities = _attend(*matrices)
        ctx.save_for_backward(*rotation, *matrices, *probabilities)
        ctx.shape = mixed_SBGPD.shape
        return attended_SMED.view(*mixed_SBGPD.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, *matrices = ctx.saved_tensors
        mixed_SBGPD = cos.new_empty(ctx.shape)
        joined = _sections(mixed_SBGPD)
        sections = [torch.empty_like(section, memory_format=torch.contiguous_format) for section in joined]
        _write_gradients(gradients[0], matrices[:3], matrices[3:], _matrices(sections))
        _rotate(sections, cos, sin.roll(sin.size(-1) // 2, dims=-1))
        for target, section in zip(joined, sections, strict=True):
            target.copy_(section)
        return mixed_SBGPD, None, None, None


def _sections(mixed_SBGPD: torch.Tensor) -> list[torch.Tensor]:
    """Return views [parts, B, G, S, E, D]: queries, and keys with values; all three in one if a key head has one
    query."""
    if mixed_SBGPD.size(3) == 3:
        return [mixed_SBGPD.permute(3, 1, 2, 0, 4).unsqueeze(4)]
    queries, keys_values = mixed_SBGPD[..., :-2, :], mixed_SBGPD[..., -2:, :]
    return [queries.permute(1, 2, 0, 3, 4).unsqueeze(0), keys_values.permute(3, 1, 2, 0, 4).unsqueeze(4)]


def _matrices(sections: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of contiguous sections: queries [M, Q, D], keys and values [M, S, D]."""
    return [part for section in sections for part in section.flatten(3, 4).flatten(1, 2)]


def _rotate(sections: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys in place."""
    for heads in (*sections[:-1], sections[-1][:-1]):
        swapped = heads.roll(heads.size(-1) // 2, dims=-1)
        heads.mul_(cos).addcmul_(swapped, sin)


def _attend(
    query_MQD: torch.Tensor, key_MSD: torch.Tensor, value_MSD: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the attended values [S, M, E, D] of scaled queries, and the probabilities of each block, [M, R, K]."""
    heads, positions, width = key_MSD.shape
    group = query_MQD.size(1) // positions
    mask = query_MQD.new_full((BLOCK, BLOCK), float("-inf")).triu_(1).unsqueeze(1)
    attended_SMED = query_MQD.new_empty(positions, heads, group, width)
    probabilities = []
    for first in range(0, positions, BLOCK):
        end = min(first + BLOCK, positions)
        size = end - first
        scores_MRK = torch.bmm(query_MQD[:, first * group : end * group], key_MSD[:, :end].mT)
        scores_MRK.view(heads, size, group, end)[..., first:].add_(mask[:size, :, :size])
        probabilities.append(torch.softmax(scores_MRK, -1, out=scores_MRK))
        attended_MRD = torch.bmm(scores_MRK, value_MSD[:, :end])
        attended_SMED[first:end] = attended_MRD.view(heads, size, group, width).transpose(0, 1)
    return attended_SMED, probabilities


def _write_gradients(
    gradient: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    probabilities: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor],
) -> None:
    """Write the gradients of scaled queries, keys and values into `totals`, from the gradient of the output."""
    query_MQD, key_MSD, value_MSD = inputs
    to_query, to_key, to_value = totals
    heads, positions, width = key_MSD.shape
    gradient_MQD = gradient.reshape(positions, heads, -1, width).transpose(0, 1).reshape(query_MQD.shape)
    block = slice(query_MQD.size(1))
    # The last block sees all keys, and is the first to write their gradients.
    for p_MRK in reversed(probabilities):
        _, size, end = p_MRK.shape
        is_last, block = end == positions, slice(block.stop - size, block.stop)
        scores_MRK = torch.bmm(gradient_MQD[:, block], value_MSD[:, :end].mT)
        torch.ops.aten._softmax_backward_data.out(scores_MRK, p_MRK, -1, p_MRK.dtype, grad_input=scores_MRK)
        to_query[:, block] = torch.bmm(scores_MRK, key_MSD[:, :end])
        for total, weights_MRK, rows_MQD in ((to_key, scores_MRK, query_MQD), (to_value, p_MRK, gradient_MQD)):
            if is_last:
                torch.bmm(weights_MRK.mT, rows_MQD[:, block], out=total)
            else:
                total[:, :end].add_(torch.bmm(weights_MRK.mT, rows_MQD[:, block]))
        block = slice(0, block.start)
