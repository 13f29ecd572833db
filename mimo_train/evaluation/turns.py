"""Answered turns of samples: the prompt of each, with the true turns before it, and its references."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from data.samples.media_spec import is_video
from data.samples.protocol import Samples
from data.samples.shard_dataset import ShardDataset
from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.prompts import Input, Prompt, Prompts

REFERENCES = ("references", "answers")
"""Fields of a record that may hold its references, the first first."""
TRUTH = "turn"
"""Name of the reference that is the turn itself."""


@dataclass(frozen=True)
class TurnPrompt:
    """The prompt of an answered turn."""

    number: int
    """Of the sample."""
    turn: int
    """Index among its answered turns, as in `predictions_of`."""
    prompt: Prompt


def turn_prompts(dataset: Samples, prompts: Prompts, number: int, turns: Sequence[int]) -> Iterator[TurnPrompt]:
    """Yield the prompts of some answered turns of a sample: its tokens and media up to each answer, as in training."""
    text, bad = dataset.read_text(number)
    if bad is not None or text.questions is None:
        return
    media = _media_of(dataset, number)
    learned = np.flatnonzero(text.loss_mask > 0)
    starts = [first for first, _ in text.questions]
    for turn in turns:
        end = starts[turn + 1] if turn + 1 < len(starts) else len(text.loss_mask)
        places = learned[(learned >= starts[turn]) & (learned < end)]
        # Labels are shifted: the token before the first learned label is the prompt's last.
        ids = text.input_ids[: places[0] + 1].tolist()
        yield TurnPrompt(number, turn, prompts.with_inputs(ids, _inputs_in(ids, media, dataset)))


def _media_of(dataset: Samples, number: int) -> dict[str, list[Input]]:
    """Return all inputs of a sample, by module."""
    inputs: dict[str, list[Input]] = {}
    if not dataset.modules:
        return inputs
    assert isinstance(dataset, ShardDataset), "only records have media"
    meta = dataset.meta(number)
    for item in dataset.modules:
        tensors, places = iter(dataset.read_media(number, item.module)[0]), meta.places(item)
        extents = meta.extents(item)
        placeholder = dataset.tokenizer.placeholder_id(item.placeholder)
        texts = item.texts(placeholder, extents, meta.tokens[item.module])
        inputs[item.module] = [
            Input(
                [*islice(tensors, item.parts(extent))],
                extent if is_video(extent) else item.size(*extent),
                place,
                text,
                "video" if is_video(extent) else item.kind,
            )
            for extent, place, text in zip(extents, places, texts, strict=True)
        ]
    return inputs


def _inputs_in(ids: list[int], media: dict[str, list[Input]], dataset: Samples) -> dict[str, list[Input]]:
    """Return the inputs whose placeholders are in `ids`: later turns may have more."""
    chosen: dict[str, list[Input]] = {}
    for item in dataset.modules:
        left = ids.count(dataset.tokenizer.placeholder_id(item.placeholder))
        chosen[item.module] = []
        for each in media[item.module]:
            tokens, _ = each.place
            if left < tokens:
                break
            left -= tokens
            chosen[item.module].append(each)
        assert left == 0, f"{left} placeholders of {item.module} are of no item"
    return chosen


class References:
    """The references of turns.

    Attributes:
        counts: number of turns by the field that their references come from; `turn` for the turn itself.
    """

    def __init__(self, dataset: Samples, field: str = ""):
        """`field`: field of the records with the references. Empty: the first of `REFERENCES` that holds texts, if a
        record has one answered turn; else the turn itself."""
        self._dataset, self._field = dataset, field
        self.counts: dict[str, int] = {}

    def of(self, number: int, turn: int, truth: str) -> list[str]:
        """Return the references of an answered turn, whose text is `truth`.

        Raises:
            UserError: the record has no such field, or it holds no texts, or not one list for each of several turns.
        """
        record = self._dataset.read_record(number)
        fields = record if isinstance(record, dict) else {}
        names = (self._field,) if self._field else REFERENCES
        name = next(
            (each for each in names if fields.get(each) is not None and (self._field or _texts(fields[each]))), None
        )
        # All answered turns of the record, also those that data.sequence_length cuts.
        turns = len(self._dataset.read_text(number)[0].questions or ()) if name or self._field else 0
        if not self._field and (name is None or turns > 1):
            self.counts[TRUTH] = self.counts.get(TRUTH, 0) + 1
            return [truth]
        values = fields.get(name or "")
        if turns > 1:
            values = values[turn] if isinstance(values, list) and len(values) == turns else None
        texts = _texts(values)
        if not texts:
            shard, key = self._dataset.locate(number)
            wanted = "a text or a list of texts"
            wanted += f" for each of its {turns} answered turns" if turns > 1 else ""
            place = f"{shard}, key {key!r}: {name or self._field}"
            raise UserError(
                f"--references: {place} must be {wanted}. The record has {', '.join(fields) or 'no fields'}"
            )
        assert name is not None
        self.counts[name] = self.counts.get(name, 0) + 1
        return texts


def _texts(values: Any) -> list[str]:
    """Return the texts of a text, a number, or a list of these or of objects with `answer`, as VQA has them; or of an
    object with `text`, as SQuAD has them."""
    if isinstance(values, dict):
        values = values.get("text")
    items = values if isinstance(values, list) else [values]
    texts = [item.get("answer") if isinstance(item, dict) else item for item in items]
    wrong = any(text is None or isinstance(text, bool | list | dict) for text in texts)
    return [] if wrong else [str(text) for text in texts]
