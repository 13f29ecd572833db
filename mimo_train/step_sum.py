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
    zeros: torch.Tensor
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
        zeros = torch.zeros(length, dtype=torch.float64, device=self._device)
        self._sections[name] = _Section(length, source, zeros)

    def reduce(self) -> None:
        """Ask every source and sum over all ranks. Collective."""
        parts = [self._part(section) for section in self._sections.values()]
        message = torch.cat(parts)
        dist.all_reduce(message)
        totals = message.split([len(part) for part in parts])
        for section, total in zip(self._sections.values(), totals, strict=True):
            section.total = total
        self.count += 1

    def _part(self, section: _Section) -> torch.Tensor:
        value = section.source()
        if value is None:
            return section.zeros
        value = value.reshape(-1).to(self._device, torch.float64)
        assert len(value) == section.length, (len(value), section.length)
        return value

    def total(self, name: str) -> torch.Tensor | None:
        """Sum of a section over ranks, float64 on the device; None before the first `reduce`."""
        section = self._sections.get(name)
        return section.total if section else None
