"""Optimizers that treat every element alone: AdamW and Lion. Averages of weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mimo_train.config.schema_optim import CHUNK
from mimo_train.optim import moments
from mimo_train.optim.moments import OFFLOAD, State
from mimo_train.optim.shards import gradient_of

EMA = "ema"
"""Key of a parameter group: `optim.ema`. Also the state with the average of a weight."""


@dataclass(frozen=True)
class Elements:
    """Elements of parameters, flat, with their gradients and states, all on their device."""

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: Sequence[State]


def elements_of(
    group: dict[str, Any], parameters: Sequence[torch.Tensor], states: Sequence[State], *, is_chunked: bool
) -> Iterator[Elements]:
    """Yield the elements of parameters with gradients: at most `CHUNK` at a time if chunked, else all."""
    most = CHUNK if is_chunked else sum(parameter.numel() for parameter in parameters)
    chunks: list[list[tuple[int, int, int]]] = []
    size = most
    for number, parameter in enumerate(parameters):
        for first in range(0, parameter.numel(), most):
            last = min(first + most, parameter.numel())
            if size + last - first > most:
                chunks.append([])
                size = 0
            chunks[-1].append((number, first, last))
            size += last - first
    device = parameters[0].device
    for chunk in chunks:
        parts = [moments.part_of(states[number], first, last) for number, first, last in chunk]
        with moments.on_device(parts, device, offloaded=group.get(OFFLOAD, False)) as on_device:
            yield Elements(
                [parameters[number].view(-1)[first:last] for number, first, last in chunk],
                [gradient_of(parameters[number]).view(-1)[first:last] for number, first, last in chunk],
                on_device,
            )


def adamw(group: dict[str, Any], elements: Elements, factor: float) -> None:
    """Update elements by AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101). Gradients count `factor` times."""
    averages, squares = ([moments.read(state, name) for state in elements.states] for name in ("exp_avg", "exp_avg_sq"))
    # Filled on the device: copying a number would wait for all queued work.
    device = elements.values[0].device
    step = torch.full((), float(group["step"]), device=device)
    torch._fused_adamw_(
        elements.values,
        elements.gradients,
        averages,
        squares,
        [],
        [step] * len(elements.values),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=torch.full((), 1.0 / factor, device=device) if factor != 1.0 else None,
    )
    for state, average, square in zip(elements.states, averages, squares, strict=True):
        moments.write(state, "exp_avg", average)
        moments.write(state, "exp_avg_sq", square)


def lion(group: dict[str, Any], elements: Elements, factor: float) -> None:
    """Update elements by Lion (Chen et al., 2023, arXiv:2302.06675). Gradients count `factor` times."""
    beta1, beta2 = group["betas"]
    averages = [moments.read(state, "exp_avg") for state in elements.states]
    scaled = torch._foreach_mul(elements.gradients, factor)
    update = torch._foreach_lerp(averages, scaled, 1 - beta1)
    torch._foreach_sign_(update)
    torch._foreach_lerp_(averages, scaled, 1 - beta2)
    torch._foreach_mul_(elements.values, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(elements.values, update, alpha=-group["lr"])
    for state, average in zip(elements.states, averages, strict=True):
        moments.write(state, "exp_avg", average)


def average(group: dict[str, Any], elements: Elements) -> None:
    """Update the averages of elements: `ema * average + (1 - ema) * weight`."""
    torch._foreach_lerp_([state[EMA] for state in elements.states], elements.values, 1 - group[EMA])
