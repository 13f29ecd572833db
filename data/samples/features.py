"""Metadata of the media of a microbatch, for encoders with cached features.

A sample whose features the lookup of its module finds is not read: its pictures are missing from the microbatch's
tensors, and its features are here instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Lookup = Callable[[str], torch.Tensor | None]
"""Gives the features [rows, width] of the sample with this identity (`Dataset.identity`), None if it has none. Called
from reading threads."""


MEDIA = "media"
"""Key of the `MicrobatchMedia` beside a module's tensors, where the dataset has a lookup for the module."""


@dataclass(frozen=True)
class SampleMedia:
    """The pictures or clips of one sample, for one module."""

    number: int
    identity: str
    rows: int
    """Tokens they take in the sequence: rows of their features."""
    features: torch.Tensor | None = None
    """[rows, width] where the lookup had them: nothing was read."""
    good: bool = True
    """False where what was read was bad, and zeros take its place."""


@dataclass(eq=False)
class MicrobatchMedia:
    """The samples of one microbatch on this rank that have media for a module, in order."""

    samples: tuple[SampleMedia, ...]
    read: Callable[[Sequence[int]], dict[str, Any]]
    """Sample numbers -> the tensors of their pictures or clips, read now."""
    ahead: torch.Tensor | None = None
    """Features of all of them, [rows, width], once they are computed ahead of their turn."""
