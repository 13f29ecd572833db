"""Queries and keys turned by their positions.

Shape suffixes: S sequence, B batch, G key heads, N query heads, E heads of a group with its key and its value, D head
dimension.
"""

from typing import Any

import torch


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [S, B, N, D] turned by their positions; of wider heads the first channels.

    Args:
        cos: [S, 1 or B, 1, D or less].
        sin: likewise, its first half negated.
    """
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        return torch.cat((turned(heads[..., :width], cos, sin), heads[..., width:]), dim=-1)
    # The halves of a head change places: what is negated is the sine, once for all layers.
    return heads * cos + heads.roll(width // 2, dims=-1) * sin


def parts_of(mixed_SBGED: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [S, B, N, D], keys and values [S, B, G, D], which stand beside each other by key head."""
    each = mixed_SBGED.shape[3] - 2
    if each == 1:
        query, key, value = mixed_SBGED.unbind(dim=3)
        return query, key, value
    query, key, value = mixed_SBGED.split([each, 1, 1], dim=3)
    return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)


def turned_parts(
    mixed_SBGED: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`parts_of`, queries and keys `turned`. In fp32 on the CPU the backward pass makes the gradient in one piece,
    instead of one for each part and a copy of all; the pass forward has the same numbers."""
    is_own = (
        mixed_SBGED.device.type == "cpu" and mixed_SBGED.dtype == torch.float32 and not torch.compiler.is_compiling()
    )
    if is_own and cos.shape[-1] == mixed_SBGED.shape[-1]:
        return _TurnedParts.apply(mixed_SBGED, cos, sin)
    query, key, value = parts_of(mixed_SBGED)
    return turned(query, cos, sin), turned(key, cos, sin), value


class _TurnedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed_SBGED: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.shape = mixed_SBGED.shape
        query, key, value = parts_of(mixed_SBGED)
        return turned(query, cos, sin), turned(key, cos, sin), value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = (angles.unsqueeze(3) for angles in ctx.saved_tensors)
        half = cos.shape[-1] // 2
        back = sin.roll(half, dims=-1)
        query, key, value = (gradient.unflatten(2, (ctx.shape[2], -1)) for gradient in gradients)
        mixed = value.new_empty(ctx.shape)
        to_query, to_key, to_value = mixed.split([query.shape[3], 1, 1], dim=3)
        for own, gradient in ((to_query, query), (to_key, key)):
            torch.mul(gradient, cos, out=own).addcmul_(gradient.roll(half, dims=-1), back)
        to_value.copy_(value)
        return mixed, None, None
