"""Optimizers that treat every element alone: AdamW and Lion."""

from collections.abc import Sequence
from typing import Any

import torch

from mimo_train.optim import moments
from mimo_train.optim.moments import State
from mimo_train.optim.shards import gradient_of

_CHUNK = 2**26
"""Elements whose moments are in fp32 at the same time, if they are stored in less."""


def adamw(group: dict[str, Any], parameters: Sequence[torch.Tensor], states: Sequence[State], factor: float) -> None:
    """Update parameters by AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101). Gradients count `factor` times."""
    for chosen, kept in _chunks(parameters, states):
        averages, squares = ([moments.read(state, name) for state in kept] for name in ("exp_avg", "exp_avg_sq"))
        # Filled on the device: copying a number would wait for all queued work.
        device = chosen[0].device
        step = torch.full((), float(group["step"]), device=device)
        torch._fused_adamw_(
            list(chosen),
            [gradient_of(parameter) for parameter in chosen],
            [each.view_as(parameter) for each, parameter in zip(averages, chosen, strict=True)],
            [each.view_as(parameter) for each, parameter in zip(squares, chosen, strict=True)],
            [],
            [step] * len(chosen),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=torch.full((), 1.0 / factor, device=device) if factor != 1.0 else None,
        )
        for state, average, square in zip(kept, averages, squares, strict=True):
            moments.write(state, "exp_avg", average)
            moments.write(state, "exp_avg_sq", square)


def lion(group: dict[str, Any], parameters: Sequence[torch.Tensor], states: Sequence[State], factor: float) -> None:
    """Update parameters by Lion (Chen et al., 2023, arXiv:2302.06675). Gradients count `factor` times."""
    beta1, beta2 = group["betas"]
    for chosen, kept in _chunks(parameters, states):
        gradients = [gradient_of(parameter) for parameter in chosen]
        averages = [moments.read(state, "exp_avg").view_as(each) for state, each in zip(kept, chosen, strict=True)]
        scaled = torch._foreach_mul(gradients, factor)
        update = torch._foreach_lerp(averages, scaled, 1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_lerp_(averages, scaled, 1 - beta2)
        torch._foreach_mul_(list(chosen), 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(list(chosen), update, alpha=-group["lr"])
        for state, average in zip(kept, averages, strict=True):
            moments.write(state, "exp_avg", average)


def _chunks(
    parameters: Sequence[torch.Tensor], states: Sequence[State]
) -> list[tuple[Sequence[torch.Tensor], Sequence[State]]]:
    """Return all at once if moments are fp32, else parts of about `_CHUNK` elements."""
    if states[0]["exp_avg"].dtype == torch.float32:
        return [(parameters, states)]
    chunks, first, size = [], 0, 0
    for index, parameter in enumerate(parameters):
        size += parameter.numel()
        if size >= _CHUNK or index == len(parameters) - 1:
            chunks.append((parameters[first : index + 1], states[first : index + 1]))
            first, size = index + 1, 0
    return chunks
