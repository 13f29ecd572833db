"""What one optimizer step is: how many samples, which of them this rank reads, and what it gets. Arithmetic and shapes;
`loader.py` does the reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.order.packing import Packing, plan_in_packs
from data.order.step_plan import Padding, Span, StepPlan, balanced_parts, equal_parts, plan_by_length, plan_in_order

LANGUAGE = "language"


@dataclass(frozen=True)
class Batching:
    """`global_batch_size`: samples per optimizer step; `microbatch_samples`: samples of one microbatch over ALL
    data-parallel ranks, that is micro_batch_size x dp(language); `size_at`: samples of the step that begins after so
    many consumed samples, while the batch grows to `global_batch_size`; `replicas`: dp(language); `padding`: how
    microbatches of similar lengths are made, or rows of several samples (`Packing`), whose microbatches follow from the
    lengths; None: samples in their order, all rows as long as any may be."""

    global_batch_size: int
    microbatch_samples: int
    size_at: Callable[[int], int] | None = None
    replicas: int = 1
    padding: Padding | Packing | None = None

    def __post_init__(self) -> None:
        assert self.microbatch_samples > 0 and self.microbatch_samples % self.replicas == 0, self
        assert self.global_batch_size > 0 and self.global_batch_size % self.microbatch_samples == 0, self

    def size(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        size = self.size_at(consumed) if self.size_at else self.global_batch_size
        assert 0 < size <= self.global_batch_size and size % self.microbatch_samples == 0, (self, size)
        return size

    def plan(
        self,
        first: int,
        size: int,
        lengths: np.ndarray | None,
        sequence_length: int,
        documents: Sequence[np.ndarray] | None = None,
    ) -> StepPlan:
        """The plan of the step of samples [first, first + size).

        Args:
            lengths: [size], planned tokens; needed with `padding`.
            documents: `StepSamples.documents`, which only packed rows have.
        """
        assert documents is None or isinstance(self.padding, Packing), "documents of samples stay apart in packed rows"
        cut = (self.microbatch_samples, self.replicas, sequence_length)
        if self.padding is None:
            return plan_in_order(first, size, *cut)
        assert lengths is not None, "the texts were not counted: TextLengths.serve"
        if isinstance(self.padding, Packing):
            return plan_in_packs(first, lengths, self.replicas, self.padding, documents)
        return plan_by_length(first, lengths, *cut, self.padding)


@dataclass(frozen=True)
class StepSamples:
    """What is known of the samples of a step, in their order; arrays are int64 [size]."""

    tokens: dict[str, np.ndarray]
    """By module: tokens in the sequence."""
    loads: dict[str, np.ndarray]
    """By module: tokens inside the encoder's layers."""
    pairs: dict[str, np.ndarray]
    """By module: pairs of tokens inside the encoder that attend to each other."""
    lengths: np.ndarray | None
    """Tokens of the whole sequence, cut; None where they have not been counted."""
    documents: list[np.ndarray] | None = None
    """Of each sample its documents' tokens, int64, where attention stays inside them; None: each is one."""


@dataclass(frozen=True)
class Reader:
    """This rank's part of one module ("language" or a `Media.module`): the `dp_rank`-th of `dp_size` contiguous slices
    of each microbatch in the order of its plan: equal, or `balanced` by the tokens inside the encoder. `sizes_only`: of
    the media just their sizes, from the index, for ranks that get the rest from others."""

    module: str
    dp_rank: int
    dp_size: int
    balanced: bool = False
    sizes_only: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, self

    def span(self, loads: Sequence[int]) -> Span:
        """Its samples of a microbatch, one for each of `loads`."""
        parts = balanced_parts(loads, self.dp_size) if self.balanced else equal_parts(len(loads), self.dp_size)
        return parts[self.dp_rank]


@dataclass(frozen=True)
class TextSample:
    """One sample as numbers. `length`: positions that are not padding."""

    number: int
    input_ids: np.ndarray  # int64 [S]
    labels: np.ndarray  # int64 [S]
    loss_mask: np.ndarray  # float32 [S]
    length: int
    positions: np.ndarray | None = None  # int64 [3, S]; None: 0, 1, 2, ...
    questions: tuple[tuple[int, str], ...] | None = None
    """(position of the first label, question before it) of each learned turn."""
    special_text: frozenset[str] = frozenset()
    """Special tokens that its texts have as plain text; only where the samples are inspected."""
    has_separators: bool = False
    """Line breaks next to markers were left out; only where the samples are inspected."""
    documents: tuple[int, ...] | None = None
    """Where its documents end, which attention stays inside of; None: it is one."""

    def without_loss(self) -> TextSample:
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))


_KEYS_HERE = {"tokens": "input_ids", "images": "modality_inputs", "pixel_values": "modality_inputs"}
"""Keys that other trainers give to a microbatch -> ours."""


class Microbatch(dict[str, Any]):
    """A microbatch, as in `StepBatch.microbatches`. An unknown key raises a KeyError that lists the known ones."""

    def __missing__(self, key: str) -> Any:
        hint = f"{key!r} is {_KEYS_HERE[key]!r} here" if _KEYS_HERE.get(key) in self else ""
        if key == "attention_mask":
            hint = "attention is causal, inside of 'documents' where samples are packed"
        raise KeyError(f"{key}: not in this microbatch. It has {', '.join(self)}{hint and f' ({hint})'}")


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank.

    plan: which samples make which microbatch, the same on every rank; what follows is in its order.
    microbatches: one dict each. With the language module: input_ids, labels, position_ids int64 [B, S] (on three axes
    [3, B, S]), loss_mask float32 [B, S], and `texts` (list of (question, truth)) if the dataset
    keeps text; of a packed row also `documents` (see `collate_packed`), and B is 1; `sources` int64 [B, S] (of each
    token, see `Dataset.sources_of`) if it has several. With media modules:
    `modality_inputs`: {module: {module: {"pixels": uint8 [N, 3, h, w]}}}, N images in sample order, a list of tensors
    if sizes differ, None in place of the inner dict if there are none; audio has "waveforms": float32 [N, samples];
    images in tiles are [tiles, 3, side, side] each, and have "sizes" (`Media.size`) beside them; readers of
    `sizes_only` have "sizes" instead: the list of sizes. Beside these `media` (`MicrobatchMedia`) for modules whose
    features the dataset looks up, and then N are the images of the samples without features only. Always:
    `sample_numbers` int64, of the samples of the language slice, else of the first media module's.
    numbers: per microbatch, module -> sample numbers that this rank reads for it.
    token_counts: module -> per microbatch -> per sample of the WHOLE microbatch, over all data-parallel ranks: tokens
    in the sequence. loads: the same of the tokens inside the encoder; pairs: of those that attend to each other.
    bad: bool [size], samples of the step that this rank found bad (a rank sees only what it reads), by place.
    """

    plan: StepPlan
    microbatches: list[Microbatch]
    numbers: list[dict[str, list[int]]]
    token_counts: dict[str, list[list[int]]]
    loads: dict[str, list[list[int]]]
    pairs: dict[str, list[list[int]]]
    bad: np.ndarray

    def __repr__(self) -> str:
        shapes = [list(batch["input_ids"].shape) for batch in self.microbatches if "input_ids" in batch]
        rows = f" of {', '.join(map(str, shapes[:4]))}{', ...' if len(shapes) > 4 else ''} tokens" if shapes else ""
        media = [f"{module} {sum(map(sum, counts)):,} tokens" for module, counts in self.token_counts.items()]
        return (
            f"StepBatch({', '.join([f'samples {self.first_sample} to {self.first_sample + self.size - 1}', *media])}, "
            f"{len(self.microbatches)} microbatches{rows}, {int(self.bad.sum())} bad)"
        )

    @property
    def first_sample(self) -> int:
        """Number of the first of its samples, which have the numbers behind it."""
        return self.plan.first

    @property
    def size(self) -> int:
        """Samples of the step, over all data-parallel ranks."""
        return self.plan.size
