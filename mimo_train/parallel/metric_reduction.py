"""The all-reduce of a step's metrics: one message sums all numbers that ranks must agree on."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from mimo_train.parallel import device as devices

LocalPart = torch.Tensor | Sequence[float] | None
"""This rank's numbers: a tensor or host numbers, padded with zeros at the end; None is all zeros."""


def reduce_metrics(parts: Mapping[str, tuple[int, LocalPart]], device: torch.device) -> dict[str, torch.Tensor]:
    """Sum named lists of numbers over all ranks in one message. Collective; the host does not wait.

    Args:
        parts: {name: (length, this rank's numbers)}; the same names and lengths in the same order on every rank.
        device: device of the sums.

    Returns:
        {name: sum over ranks, float64 [length] on `device`}. Integers up to 2^53 stay exact.
    """
    runs: list[torch.Tensor | list[float]] = []
    for name, (length, part) in parts.items():
        numbers = 0 if part is None else part.numel() if isinstance(part, torch.Tensor) else len(part)
        assert numbers <= length, (name, numbers, length)
        if isinstance(part, torch.Tensor):
            runs.append(part.reshape(-1).to(device, torch.float64))
            part = None
        on_host = [*(part or ()), *[0.0] * (length - numbers)]
        # Copy adjacent host numbers to the device together.
        if runs and isinstance(runs[-1], list):
            runs[-1] += on_host
        elif on_host:
            runs.append(on_host)
    total = torch.cat([run if isinstance(run, torch.Tensor) else _on_device(run, device) for run in runs])
    dist.all_reduce(total)
    return dict(zip(parts, total.split([length for length, _ in parts.values()]), strict=True))


def _on_device(numbers: list[float], device: torch.device) -> torch.Tensor:
    return devices.tensor(numbers, torch.float64, device)
