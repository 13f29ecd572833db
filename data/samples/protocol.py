"""The interface of a run's samples, for any file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.order.mixture import Phase
from data.order.sources import MixedOrder, Source
from data.order.step import Microbatch, StepSamples, TextSample
from data.samples.bad_samples import BadSample, BadSamples
from data.samples.media_spec import Media, MediaInput
from data.storage.url import Place
from data.text.tokens import Tokenizer


class Samples(ABC):
    """An endless stream of samples, addressed by number. Thread-safe. The defaults are for text without media."""

    sources: tuple[Source, ...]
    """The mixed sources, or one unnamed source."""
    order: MixedOrder
    """Sample number -> global row."""
    tokenizer: Tokenizer
    sequence_length: int
    keep_text: bool
    """True if text samples keep their questions."""
    inspects: bool = False
    """True if text samples report their special tokens and removed separators."""
    modules: tuple[Media, ...] = ()
    answers: int = 1
    """Answers of each sample, each with the prompt: token sequences."""
    lookups: dict[str, Lookup]
    """Module -> lookup of features that need not be read (`ItemFeatures`). Set before readers start."""
    lengths: np.ndarray | None
    """int32 [samples], with several answers [samples, answers], by row: tokens; None until counted
    (`TextLengths.serve`)."""
    reference: np.ndarray | None = None
    """float32 [samples, answers], by row: log-probabilities of a reference model; None: not in microbatches."""
    shards: Sequence[Place]
    fingerprint: str
    """Hash of everything that determines the order of samples, except seed and weights."""
    text_fingerprint: str
    """Hash of everything that determines a record's tokens: vocabulary, chat template, placeholders."""
    is_remote: bool = False
    """True if files are read over a network, so that reads should be announced (`expect_samples`)."""
    allowed_bad_samples: int
    bad_samples: BadSamples

    def __len__(self) -> int:
        """Return the samples of one epoch."""
        return self.order.size

    def set_phases(self, phases: Sequence[Phase]) -> None:
        """Set the sources' weights, before readers start."""
        self.order = self.order.with_phases(phases)

    @abstractmethod
    def locate(self, number: int) -> tuple[Place, str]:
        """Return (file, position in it) of a global sample number, of any epoch."""

    @abstractmethod
    def identity(self, number: int) -> str:
        """Return an identity that is unique over all runs."""

    @abstractmethod
    def plan_step(self, first: int, size: int) -> StepSamples:
        """Return what is known of samples [first, first + size) without reading them."""

    def expect_samples(  # noqa: B027
        self, wanted: Iterable[tuple[int, Mapping[str, Collection[int]], bool]]
    ) -> None:
        """Start to read remote samples: (number, {module: numbers of its media items}, True if its text is needed)."""

    @abstractmethod
    def read_text(self, number: int) -> tuple[TextSample, BadSample | None]:
        """Return the tokens of a sample, or its stand-in and why it is bad. Readers run ahead, so it is not counted."""

    def read_record(self, number: int) -> Any:
        """Return a sample's JSON record, or the columns of its row; None if it has none."""
        return None

    def tensors_of(self, microbatch: Microbatch) -> dict[str, Any]:
        """Return further tensors of a microbatch of the language model."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def token_counts(self, number: int) -> dict[str, int]:
        """Return module -> sequence tokens of its media in this sample."""
        return {}

    def input_sizes(self, number: int, module: str, items: Collection[int] | None = None) -> list[tuple[int, ...]]:
        """Return `Media.size` of each input that `read_media` returns. Raises KeyError for an unknown module."""
        raise KeyError(module)

    def read_media(
        self, number: int, module: str, items: Collection[int] | None = None
    ) -> tuple[list[MediaInput], BadSample | None]:
        """Return the module's inputs, one for each image, frame of a video or audio item, or zeros and why the sample
        is bad (not counted). `items`: numbers of the media items to read (`MediaItems.numbers`); None: all.

        Images are uint8 [3, height, width], in tiles [tiles, 3, side, side]; audio is float32 [samples]; see also
        `Media.read`. Raises KeyError for an unknown module.
        """
        raise KeyError(module)


Lookup = Callable[[str], torch.Tensor | None]
"""`Samples.identity` of a sample and the number of a media item in it, as text -> its features [rows, width], or None.
Called from reading threads."""


MEDIA = "media"
"""Key of the `MicrobatchMedia` next to a module's tensors, if the dataset has a lookup for the module."""


@dataclass(frozen=True)
class ItemFeatures:
    """A media item for one module, and its features if they are known."""

    sample: int
    """Number of its sample."""
    number: int
    """Its number in the sample (`MediaItems.numbers`)."""
    identity: str
    rows: int
    """Sequence tokens: rows of its features."""
    features: torch.Tensor | None = None
    """[rows, width] from the lookup; nothing was read."""
    is_good: bool = True
    """False if it was bad and zeros replace it."""


@dataclass(eq=False)
class MicrobatchMedia:
    """The media items of one microbatch that this rank computes for a module, in order."""

    items: tuple[ItemFeatures, ...]
    read: Callable[[Sequence[ItemFeatures]], dict[str, Any]]
    """Items -> tensors of their media, read now."""
    ahead: torch.Tensor | None = None
    """Features of all of them, [rows, width], if computed ahead."""
