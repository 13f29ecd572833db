"""An optimizer step: its size, the samples that this rank reads, and its batch. `loader.py` does the reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import numpy as np

from data.order.load_balance import MediaItems
from data.order.packing import Packing, plan_in_packs
from data.order.step_plan import Padding, StepPlan, plan_by_length, plan_in_order

LANGUAGE = "language"


@dataclass(frozen=True)
class Batching:
    """How samples become steps and microbatches.

    global_batch_size: samples per optimizer step; microbatch_samples: samples of a microbatch over ALL data-parallel
    ranks, that is micro_batch_size x dp(language); size_at: consumed samples -> samples of the next step, while the
    batch grows; replicas: dp(language); padding: microbatches of similar lengths (`Padding`), or rows of several
    samples (`Packing`), whose number follows from lengths; None: samples in order, all rows at full length.
    """

    global_batch_size: int
    microbatch_samples: int
    size_at: Callable[[int], int] | None = None
    replicas: int = 1
    padding: Padding | Packing | None = None

    def __post_init__(self) -> None:
        assert self.microbatch_samples > 0 and self.microbatch_samples % self.replicas == 0, self
        assert self.global_batch_size > 0 and self.global_batch_size % self.microbatch_samples == 0, self

    def size(self, consumed: int) -> int:
        """Return the samples of the step that starts after `consumed` samples."""
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
        answers: int = 1,
    ) -> StepPlan:
        """Return the plan of the step of samples [first, first + size).

        Args:
            lengths: [size], planned tokens; required with `padding`.
            documents: `StepSamples.documents`; only for packed rows, or several answers.
            answers: answers of each sample, which stay in one microbatch.
        """
        if documents is not None and answers == 1:
            assert isinstance(self.padding, Packing), "documents of samples stay apart in packed rows"
        cut = (self.microbatch_samples, self.replicas, sequence_length)
        if self.padding is None:
            return plan_in_order(first, size, *cut, answers)
        assert lengths is not None, "the texts were not counted: TextLengths.serve"
        assert answers == 1 or documents is not None, "the answers were not counted"
        if isinstance(self.padding, Packing):
            return plan_in_packs(first, lengths, self.replicas, self.padding, documents, answers)
        return plan_by_length(first, lengths, *cut, self.padding, documents)


@dataclass(frozen=True)
class StepSamples:
    """Token counts of a step's samples, in order; arrays are int64 [size]."""

    tokens: dict[str, np.ndarray]
    """Module -> tokens in the sequence."""
    loads: dict[str, np.ndarray]
    """Module -> tokens inside the encoder's layers."""
    pairs: dict[str, np.ndarray]
    """Module -> pairs of tokens that attend to each other inside the encoder."""
    lengths: np.ndarray | None
    """Tokens of the truncated sequence, over all answers; None if not counted."""
    documents: Sequence[np.ndarray] | None = None
    """Tokens of each sample's documents or answers, int64, if attention stays inside them; None: each sample is one
    document."""
    media: dict[str, MediaItems] = field(default_factory=dict)
    """Module -> media items of the samples."""


@dataclass(frozen=True)
class Reader:
    """This rank's part of one module ("language" or a `Media.module`): that of the `dp_rank`-th of `dp_size` ranks.

    `by_items` and `pass_microbatches` are those of `routes_of`. `sizes_only`: read only the sizes of media, from the
    index.
    """

    module: str
    dp_rank: int
    dp_size: int
    by_items: bool = False
    pass_microbatches: int = 1
    sizes_only: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size and self.pass_microbatches > 0, self


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
    """Special tokens that its texts have as plain text; set only for inspection."""
    has_separators: bool = False
    """True if line breaks next to markers were removed; set only for inspection."""
    documents: tuple[int, ...] | None = None
    """Ends of its documents, which bound attention; None: one document."""
    blocks: np.ndarray | None = None
    """Tokens with one number see each other, -1: only earlier ones; int64 [S]. None: all of them -1."""
    others: tuple[TextSample, ...] = ()
    """Its other answers after the same prompt, each with the prompt."""
    target: float = nan
    """`Preference.target`."""

    @property
    def answers(self) -> tuple[TextSample, ...]:
        """The texts of all answers."""
        return self, *self.others

    def without_loss(self) -> TextSample:
        others = tuple(other.without_loss() for other in self.others)
        return replace(self, loss_mask=np.zeros_like(self.loss_mask), others=others)


_KEYS_HERE = {"tokens": "input_ids", "images": "modality_inputs", "pixel_values": "modality_inputs"}
"""Other trainers' keys of a microbatch -> ours."""


class Microbatch(dict[str, Any]):
    """A microbatch, see `StepBatch.microbatches`. An unknown key raises a KeyError that lists the known ones."""

    def __missing__(self, key: str) -> Any:
        hint = f"{key!r} is {_KEYS_HERE[key]!r} here" if _KEYS_HERE.get(key) in self else ""
        if key == "attention_mask":
            hint = "attention is causal, inside of 'documents' where samples are packed"
        raise KeyError(f"{key}: not in this microbatch. It has {', '.join(self)}{hint and f' ({hint})'}")


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank.

    Attributes:
        plan: the samples of each microbatch, the same on every rank. Everything else is in its order.
        microbatches: one dict each, with `sample_numbers` int64 of the language slice, else of the first media
            module's. With the language module: input_ids, labels, position_ids int64 [B, S] (M-RoPE: [3, B, S]),
            loss_mask float32 [B, S]; `questions` of each sample if the dataset keeps text; `sources` int64 [B, S], of
            each token, if there are several; `blocks` int64 [B, S] if any tokens see later ones (`TextSample.blocks`).
            A packed row has B = 1 and `documents` (see `collate_packed`). With K answers for each of n samples, B is
            n * K, in packed rows they are documents, and there are `answers` int64 [B, S], place of the sample * K +
            answer where the loss mask is 1, else -1; `targets` float32 [n]; `reference` float32 [n, K] if the dataset
            has it; `feature_rows`: {module: int64}, row of the samples' features for each placeholder. With media
            modules: `modality_inputs`: {module: {module: {"pixels": uint8 [N, 3, h, w]}}} of N images in sample order,
            a list of tensors if sizes differ, None as the inner dict if there are none. Audio has "waveforms": float32
            [N, samples]. Tiled images are [tiles, 3, side, side] each, with "sizes" (`Media.size`). Readers of
            `sizes_only` have only "sizes", a list. Modules with a lookup have `media` (`MicrobatchMedia`) too; N then
            excludes samples with features.
        numbers: per microbatch, module -> number of each sample that this rank reads for it -> numbers of its media
            items that this rank reads (`MediaItems.numbers`).
        token_counts: module -> microbatch -> sample of the WHOLE microbatch (all data-parallel ranks): tokens.
        loads: as token_counts, for tokens inside the encoder.
        pairs: as token_counts, for pairs of these that attend to each other.
        bad: bool [size], by place: samples that this rank found bad (it sees only what it reads).
        media: module -> media items of all samples.
    """

    plan: StepPlan
    microbatches: list[Microbatch]
    numbers: list[dict[str, dict[int, list[int]]]]
    token_counts: dict[str, list[list[int]]]
    loads: dict[str, list[list[int]]]
    pairs: dict[str, list[list[int]]]
    bad: np.ndarray
    media: dict[str, MediaItems]

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
        """The number of the first sample; the others follow it."""
        return self.plan.first

    @property
    def size(self) -> int:
        """The samples of the step, over all data-parallel ranks."""
        return self.plan.size
