"""Samples of several answers after one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan

from data.errors import RecordError
from data.order.step import TextSample
from data.records.conversation import KINDS, Conversation
from data.text_format import Key

ANSWERS = {"turns": 1, "pairs": 2, "labels": 2}
"""Form of records -> answers of a sample. `turns`: a conversation; `pairs`: the chosen and the rejected answer;
`labels`: the answer, and that of the sample before, which does not match its prompt."""


def joined(answers: Sequence[TextSample], target: float = nan) -> TextSample:
    """Return the answers as one sample. None has loss if any has no token with loss, such as after a prompt that fills
    the sequence: a comparison requires all."""
    first, *others = answers
    if not others:
        return first
    sample = replace(
        first,
        others=tuple(others),
        target=target,
        special_text=frozenset().union(*(answer.special_text for answer in answers)),
        has_separators=any(answer.has_separators for answer in answers),
    )
    return sample if all(answer.loss_mask.any() for answer in answers) else sample.without_loss()


def rows_before(row: int, rows: int) -> Iterator[int]:
    """Yield the other rows of a shard backwards from `row`; the last row is before the first."""
    return ((row - step) % rows for step in range(1, rows))


def with_answer_of(conversation: Conversation, other: Conversation, key: Key) -> Conversation:
    """Return the prompt of a conversation with the answer of another one. The answer starts at the first turn with
    loss. Raises RecordError if one of the answers has media, which belong to its sample."""
    answer, other_answer = conversation.turns[_begin(conversation) :], other.turns[_begin(other) :]
    if any(part.kind in KINDS for turn in (*answer, *other_answer) for part in turn.parts):
        raise RecordError(f"key {key!r}: its answer, or that of the sample before it, has media. Use records without")
    return replace(conversation, turns=(*conversation.turns[: _begin(conversation)], *other_answer))


def _begin(conversation: Conversation) -> int:
    return next((at for at, turn in enumerate(conversation.turns) if turn.is_learned), len(conversation.turns))
