"""The one sum over all ranks of a step: everything that ranks must agree on travels in one message."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Source = Callable[[], torch.Tensor | None]
"""Gives this rank's part of a section, or None for zeros."""


@dataclass
class _Section:
    length: int
    source: Source
    total: torch.Tensor | None = None


class StepSum:
    """Sections of float64 numbers, summed over ranks in one message at the end of backward.

    Every rank opens the same sections in the same order. Whole numbers up to 2^53 stay exact.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sections: dict[str, _Section] = {}
        self.count = 0
        """Sums made so far."""

    def open(self, name: str, length: int, source: Source) -> None:
        """Add a section of `length` numbers, or give an existing one a new source."""
        self._sections[name] = _Section(length, source)

    def reduce(self) -> None:
        """Ask every source and sum over all ranks. Collective."""
        message = torch.zeros(sum(section.length for section in self._sections.values()), dtype=torch.float64)
        message = message.to(self._device)
        parts = dict(zip(self._sections, message.split([s.length for s in self._sections.values()]), strict=True))
        for name, section in self._sections.items():
            value = section.source()
            if value is not None:
                parts[name].copy_(value)
            section.total = parts[name]
        dist.all_reduce(message)
        self.count += 1

    def total(self, name: str) -> torch.Tensor | None:
        """Sum of a section over ranks, float64 on the device; None before the first `reduce`."""
        section = self._sections.get(name)
        return section.total if section else None
