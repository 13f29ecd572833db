"""The all-reduce of a step: everything that ranks must agree on is summed in one message."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mimo_train.parallel import device

Source = Callable[[], torch.Tensor | Sequence[float] | None]
"""Returns this rank's part of a section: a tensor, or numbers on the host, padded with zeros at the end; None is all
zeros."""


@dataclass
class _Section:
    start: int
    length: int
    source: Source


class StepSum:
    """Sections of float64 numbers, summed over ranks in one message at the end of backward.

    Every rank opens the same sections in the same order. Whole numbers up to 2^53 stay exact.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sections: dict[str, _Section] = {}
        self._length = 0
        self._total: torch.Tensor | None = None
        self.count = 0
        """Sums made so far."""

    def open(self, name: str, length: int, source: Source) -> None:
        """Add a section of `length` numbers."""
        assert name not in self._sections, name
        self._sections[name] = _Section(self._length, length, source)
        self._length += length

    def reduce(self) -> None:
        """Call every source and sum over all ranks. Collective."""
        runs: list[torch.Tensor | list[float]] = []
        for section in self._sections.values():
            part = section.source()
            if isinstance(part, torch.Tensor):
                runs.append(part.reshape(-1).to(self._device, torch.float64))
                numbers = [0.0] * (section.length - part.numel())
            else:
                numbers = [*(part or ()), *[0.0] * (section.length - len(part or ()))]
            # Adjacent numbers on the host are copied to the device together.
            if runs and isinstance(runs[-1], list):
                runs[-1] += numbers
            elif numbers:
                runs.append(numbers)
        total = torch.cat([self._on_device(run) for run in runs])
        assert len(total) == self._length, (len(total), self._length)
        dist.all_reduce(total)
        self._total = total
        self.count += 1

    def _on_device(self, run: torch.Tensor | list[float]) -> torch.Tensor:
        if isinstance(run, torch.Tensor):
            return run
        return device.tensor(run, torch.float64, self._device)

    def sum_of(self, name: str) -> torch.Tensor:
        """`total` of a section that is open, after a `reduce`."""
        total = self.total(name)
        assert total is not None, f"nothing was summed yet, or there is no section {name}"
        return total

    def total(self, name: str) -> torch.Tensor | None:
        """Sum of a section over ranks, float64 on the device; None before the first `reduce`."""
        if self._total is None or name not in self._sections:
            return None
        section = self._sections[name]
        return self._total[section.start : section.start + section.length]
