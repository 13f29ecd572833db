"""Prompts with answers as samples of a run, so that they become the microbatches of training at any layout.

Shape suffixes: B batch, S sequence.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.collate import collate_media
from data.order.load_balance import item_per_sample
from data.order.sources import Source, order_of
from data.order.step import Microbatch, StepSamples, TextSample
from data.samples.bad_samples import BadSample, BadSamples
from data.samples.media_spec import Media, MediaInput
from data.samples.protocol import Samples
from data.storage.url import Place
from data.text.tokens import Tokenizer
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.generation.prompts import Prompt
from mimo_train.inputs.datasets import media_of

PLACES, SAMPLES, MASK = "places", "samples", "mask"
"""Tensors of every batch: the number of an answer's token among those of all answers, and that of its sample, int64 [B,
S], -1 outside of answers; and 1 at their tokens, else 0, float32 [B, S]."""
TENSORS = "tensors"
"""Key of a microbatch with the tensors of its batch by name."""


@dataclass(frozen=True)
class Batch:
    """Prompts, the tokens of their answers, and values for a loss function."""

    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[int]]
    """Tokens of each answer, at least one; with the token that ends the turn if it is to be learned."""
    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Name -> for each sample a number, or one for each token of its answer. Loss functions get float32 [B, S] with the
    values at the tokens of answers, else 0."""

    def __post_init__(self) -> None:
        lengths = {"answers": len(self.answers)} | {name: len(values) for name, values in self.tensors.items()}
        for name, length in lengths.items():
            if length != len(self):
                raise UserError(f"{name}: expected a value for each of {len(self)} prompts, got {length}")
        if empty := [number for number, answer in enumerate(self.answers) if not len(answer)]:
            raise UserError(f"answers: sample {empty[0]} has no token. Leave it out or give the end of the turn")
        if taken := {PLACES, SAMPLES, MASK} & self.tensors.keys():
            raise UserError(f"tensors: {taken.pop()} is a tensor of every batch. Choose another name")

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, first: int, size: int) -> "Batch":
        """Return `size` samples from number `first`. Behind the last sample it repeats, to be masked."""
        numbers = [min(number, len(self) - 1) for number in range(first, first + size)]
        tensors = {name: [values[number] for number in numbers] for name, values in self.tensors.items()}
        return Batch([self.prompts[n] for n in numbers], [self.answers[n] for n in numbers], tensors)

    @cached_property
    def ends(self) -> list[int]:
        """The number of tokens in the answers up to each one, included."""
        return np.cumsum([len(answer) for answer in self.answers]).tolist()

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """Name -> values of all tokens of answers, in order: [tokens]."""
        lengths = torch.tensor([len(answer) for answer in self.answers])
        values = {PLACES: torch.arange(self.ends[-1])}
        values[SAMPLES] = torch.arange(len(self)).repeat_interleave(lengths)
        for name, of_samples in self.tensors.items():
            rows = []
            for number, (value, length) in enumerate(zip(of_samples, lengths.tolist(), strict=True)):
                row = torch.as_tensor(value, dtype=torch.float32, device="cpu")
                if row.dim() > 1 or row.dim() == 1 and len(row) != length:
                    raise UserError(
                        f"{name}: sample {number} has shape {tuple(row.shape)}, expected a number or one for each of "
                        f"the {length} tokens of its answer"
                    )
                rows.append(row.expand(length))
            values[name] = torch.cat(rows)
        return values


class BatchSamples(Samples):
    """The samples of a batch, by their numbers."""

    fingerprint = "engine"

    def __init__(self, cfg: ConfigContainer, tokenizer: Tokenizer, batch: Batch, learned: int | None = None):
        """
        Args:
            learned: the samples that have a loss, the first ones; None: all.

        Raises:
            UserError: a prompt with its answer is longer than `data.sequence_length`, or a token of an answer is
                outside of the vocabulary.
        """
        self.batch, self.tokenizer, self.sequence_length = batch, tokenizer, cfg.data.sequence_length
        self.text_fingerprint, self.modules = tokenizer.fingerprint, tuple(media_of(cfg))
        self.sources, self.shards = (Source("", "engine"),), [Path("engine")]
        self.keep_text, self.lookups, self.allowed_bad_samples = False, {}, 0
        self.bad_samples = BadSamples(0)
        self.learned, size = len(batch) if learned is None else learned, max(len(batch), 1)
        self.order = order_of(self.sources, [1], [size], [""], cfg.run.seed, False, 1, 0.0, False)
        lengths = [len(prompt.ids) + len(answer) for prompt, answer in zip(batch.prompts, batch.answers, strict=True)]
        self.lengths = np.array(lengths, dtype=np.int32)
        for number, answer in enumerate(batch.answers):
            if outside := [token for token in answer if not 0 <= token < tokenizer.vocab_size]:
                size = tokenizer.vocab_size
                raise UserError(f"answers: sample {number} has token {outside[0]}, and the vocabulary has {size}")
        if any(length > self.sequence_length for length in lengths):
            number = int(self.lengths.argmax())
            raise UserError(
                f"data.sequence_length: is {self.sequence_length}, and sample {number} has {lengths[number]} tokens "
                f"({len(batch.answers[number])} in its answer). Raise it or give shorter answers"
            )

    def locate(self, number: int) -> tuple[Place, str]:
        return self.shards[0], str(number)

    def identity(self, number: int) -> str:
        raise AssertionError("features of an engine's media are not cached")

    def plan_step(self, first: int, size: int) -> StepSamples:
        prompts = self.batch.prompts[first : first + size]
        tokens = {
            item.module: np.array([prompt.rows[item.module] for prompt in prompts], dtype=np.int64)
            for item in self.modules
        }
        assert self.lengths is not None
        # The work of an encoder is balanced by samples and their tokens in the sequence: extents of media are not kept.
        items = {name: item_per_sample(rows) for name, rows in tokens.items()}
        lengths = self.lengths[first : first + size].astype(np.int64)
        return StepSamples(tokens, tokens, tokens, lengths, media=items)

    def read_text(self, number: int) -> tuple[TextSample, BadSample | None]:
        """Return a sample as `data.collate.to_sample` makes it of a conversation."""
        prompt, answer, length = self.batch.prompts[number], self.batch.answers[number], self.sequence_length
        ids = [*prompt.ids, *answer]
        input_ids, labels = (np.full(length, self.tokenizer.pad_id, dtype=np.int64) for _ in range(2))
        loss_mask = np.zeros(length, dtype=np.float32)
        # A model may draw a placeholder, which it then reads as padding (`Answers`): there are no features for it.
        input_ids[: len(ids)] = [*prompt.ids, *map(self.tokenizer.as_text, answer)]
        labels[: len(ids) - 1] = ids[1:]
        if number < self.learned:
            loss_mask[len(prompt.ids) - 1 : len(ids) - 1] = 1
        sample = TextSample(number, input_ids, labels, loss_mask, len(ids))
        changes: dict[str, Any] = {}
        if prompt.positions is not None:
            changes["positions"] = prompt.positions_to(length)[:, 0].numpy()
        if prompt.blocks is not None:
            changes["blocks"] = prompt.blocks_to(length).numpy()
        return TextSample(**(vars(sample) | changes)), None

    def read_media(
        self, number: int, module: str, items: Collection[int] | None = None
    ) -> tuple[list[MediaInput], BadSample | None]:
        arguments = self.batch.prompts[number].inputs[module]
        return ([*arguments[module][self._media(module).field]] if arguments else []), None

    def input_sizes(self, number: int, module: str, items: Collection[int] | None = None) -> list[tuple[int, ...]]:
        return list(self.batch.prompts[number].sizes.get(module, ()))

    def token_counts(self, number: int) -> dict[str, int]:
        return dict(self.batch.prompts[number].rows)

    def tensors_of(self, microbatch: Microbatch) -> dict[str, Any]:
        """Return the batch's tensors at the tokens of answers, whose order is that of the samples."""
        is_learned = microbatch["loss_mask"] > 0
        ends, numbers = self.batch.ends, microbatch["sample_numbers"].tolist()
        spans = [
            range(ends[number] - len(self.batch.answers[number]), ends[number])
            for number in numbers
            if number < self.learned
        ]
        places = torch.tensor([place for span in spans for place in span], dtype=torch.int64)
        tensors = {}
        for name, values in self.batch.values.items():
            outside = torch.full(is_learned.shape, -1 if name in (PLACES, SAMPLES) else 0, dtype=values.dtype)
            outside[is_learned] = values[places]
            tensors[name] = outside
        return {TENSORS: tensors}

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _media(self, module: str) -> Media:
        return next(item for item in self.modules if item.module == module)


def question_of(dataset: Samples, number: int) -> tuple[Prompt, list[int]]:
    """Return the first question of a sample as a prompt, and the tokens of its true answer. Raises UserError if a later
    turn has media."""
    text, bad = dataset.read_text(number)
    if bad is not None:
        raise UserError(f"{bad}")
    is_learned = text.loss_mask > 0
    begin = int(is_learned.argmax())
    end = begin + int((~is_learned[begin:]).argmax()) if not is_learned[begin:].all() else len(is_learned)
    ids, inputs, rows, sizes = text.input_ids[: begin + 1].tolist(), {}, {}, {}
    for item in dataset.modules:
        name, placeholder = item.module, dataset.tokenizer.placeholder_id(item.placeholder)
        rows[name], in_all = ids.count(placeholder), int((text.input_ids == placeholder).sum())
        if rows[name] != in_all:
            raise UserError(f"sample {number}: {in_all - rows[name]} tokens of {name} come after the first answer")
        arguments = collate_media(dataset.read_media(number, name)[0], item.field)
        sizes[name] = dataset.input_sizes(number, name)
        if arguments is not None and item.canvas:
            arguments["sizes"] = sizes[name]
        inputs[name] = None if arguments is None else {name: arguments}
    positions = None if text.positions is None else torch.from_numpy(text.positions[:, : begin + 1])
    blocks = None if text.blocks is None else torch.from_numpy(text.blocks[: begin + 1])
    return Prompt(ids, inputs, rows, positions, blocks, sizes), text.labels[begin:end].tolist()
