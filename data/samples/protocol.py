"""What a run's samples are to those who read them, whatever files they are in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.order.sources import SourcesView
from data.order.step import StepSamples, TextSample
from data.samples.bad_samples import BadSample, BadSamples
from data.samples.media_spec import Media
from data.storage.url import Place
from data.text.tokens import Tokenizer


class Samples(SourcesView, ABC):
    """An endless stream of samples, addressed by number. Methods may be called from several threads.

    Here samples are texts alone: whoever has media, `Dataset`, says more.
    """

    tokenizer: Tokenizer
    sequence_length: int
    keep_text: bool
    """Whether text samples carry their questions too."""
    inspects: bool = False
    """Whether text samples say which special tokens their texts have, and whether separators were left out."""
    modules: tuple[Media, ...] = ()
    """The encoder modules."""
    lookups: dict[str, Lookup]
    """By module: where features of samples are found that need not be read (see `SampleMedia`). For readers that run
    ahead; set before they begin."""
    lengths: np.ndarray | None
    """int32 [samples], by row: tokens of each sample; None until they have been counted (`TextLengths.serve`)."""
    shards: Sequence[Place]
    """Files that hold the samples."""
    fingerprint: str
    """Of what the order of samples follows from, but for seed and weights."""
    text_fingerprint: str
    """Of everything that the tokens of a record follow from: vocabulary, chat template, placeholders."""
    is_remote: bool = False
    """True if files are read over a network: then it pays to announce reads (`expect_samples`)."""
    allowed_bad_samples: int
    bad_samples: BadSamples
    """Those that this process has found."""

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self.order.size

    def is_bad(self, number: int) -> bool:
        """Whether this process has found sample `number` bad; False for one that it has not read."""
        return number in self.bad_samples

    @abstractmethod
    def locate(self, number: int) -> tuple[Place, str]:
        """(file, where in it) of a global sample number, of any epoch."""

    @abstractmethod
    def identity(self, number: int) -> str:
        """A unique identity over all runs."""

    @abstractmethod
    def plan_step(self, first: int, size: int) -> StepSamples:
        """What is known of samples [first, first + size), all at once; reads none."""

    def expect_samples(self, wanted: Iterable[tuple[int, Collection[str], bool]]) -> None:
        """Start to read what is needed of remote samples: (sample number, modules that need media of it, whether its
        text is needed). Raises DataError."""

    @abstractmethod
    def read_text(self, number: int) -> tuple[TextSample, BadSample | None]:
        """Tokens of a sample, or of its stand-in with why it is bad. A bad sample is returned and not counted: readers
        run ahead."""

    @abstractmethod
    def prompt_and_truth(self, number: int) -> tuple[str, str]:
        """(last question, its answer) as text, for reports; ("", "") for a bad sample."""

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""

    def token_counts(self, number: int) -> dict[str, int]:
        """Tokens that each module's images or clips take in this sample."""
        return {}

    def input_sizes(self, number: int, module: str) -> list[tuple[int, int]]:
        """`Media.size` of each of the module's images or clips in this sample. Raises KeyError: no such module."""
        raise KeyError(module)

    def media(self, number: int, module: str) -> list[torch.Tensor]:
        """The module's inputs, one per image (uint8 [3, height, width], in tiles [tiles, 3, side, side]) or clip
        (float32 [samples]); zeros if bad. Raises TooManyBadSamples, KeyError: no such module."""
        raise KeyError(module)

    def read_media(self, number: int, module: str) -> tuple[list[torch.Tensor], BadSample | None]:
        """`media`, but a bad sample is returned instead of counted."""
        raise KeyError(module)


Lookup = Callable[[str], torch.Tensor | None]
"""Gives the features [rows, width] of the sample with this identity (`Dataset.identity`), None if it has none. Called
from reading threads."""


MEDIA = "media"
"""Key of the `MicrobatchMedia` beside a module's tensors, where the dataset has a lookup for the module."""


@dataclass(frozen=True)
class SampleMedia:
    """The images or clips of one sample, for one module."""

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
    """Sample numbers -> the tensors of their images or clips, read now."""
    ahead: torch.Tensor | None = None
    """Features of all of them, [rows, width], once they are computed ahead of their turn."""
