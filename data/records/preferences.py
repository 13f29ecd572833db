"""Parse records of preferences: pairs of a chosen and a rejected answer, or an answer with a label.

Accepted are the forms of TRL (`prompt`, `chosen`, `rejected`), ms-swift (`messages` with `rejected_response` or
`rejected_messages`) and LLaMA-Factory (`conversations` or `instruction`, `chosen`, `rejected`); with a label,
`prompt` and `completion`, or turns that end in the answer.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.errors import NothingToLearn, RecordError
from data.media.options import BOUNDS, Bounds
from data.records.conversation import Conversation, Part, Turn, Visual, media_first, with_frames
from data.records.markers import special_marker
from data.records.record_checks import NO_OTHER_MEMBERS, OtherMembers, require_download, require_files
from data.records.records import RecordParser, errors_start_with, field_names, json_type
from data.text_format import Key

_REJECTED_MEDIA = {f"rejected_{kind}s": f"{kind}s" for kind in ("image", "video", "audio")}
_PROMPTS = ("prompt", "question")
_PAIR = ("chosen", "rejected")
_MESSAGE_FIELDS = {"from": "role", "value": "content"}


@dataclass(frozen=True)
class Preference:
    """The answers of a record. Only turns of the answer itself have loss, not those of its prompt."""

    answers: tuple[Conversation, ...]
    """(chosen, rejected), or (answer,) of a record with a label."""
    target: float = math.nan
    """Of a label: 1 if desirable, else 0. Of a pair: its margin, or nan."""


def parse_preference(
    raw: bytes,
    extension: str,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    others: OtherMembers = NO_OTHER_MEMBERS,
    visuals: Sequence[Visual] = (),
    *,
    form: str,
) -> Preference:
    """Parse a sample's record as a preference. `form`: "pairs" or "labels". See `parse_record` for the other arguments.

    Text prompts are user turns and text answers assistant turns. Two texts without a prompt and media are plain texts;
    their common words are the prompt. Media without markers precede the first question.

    Raises:
        RecordError: an error of `parse_record`; a record of another form; or equal answers.
        NothingToLearn: an answer is null or blank.
    """
    parser = RecordParser(media, bounds, visuals)
    with errors_start_with(f"key {key!r}: "):
        record = parser.record(raw, extension)
        if not isinstance(record, dict):
            raise RecordError(f"the record is {json_type(record)}, not an object with answers")
        require_download(record, media)
        preference = (_pair if form == "pairs" else _labelled)(parser, record)
        require_files(record, key, others, media)
        for answer in preference.answers:
            parser.check(answer)
    return replace(preference, answers=tuple([with_frames(answer, visuals, key) for answer in preference.answers]))


def _pair(parser: RecordParser, record: Mapping[str, Any]) -> Preference:
    for name, other in _REJECTED_MEDIA.items():
        if record.get(name) not in (None, record.get(other)):
            raise RecordError(f"{name} differs from {other}. Both answers of a pair must have the same media")
    if record.keys().isdisjoint(_PAIR):
        raise RecordError(
            f"the record has no pair of answers (chosen and rejected); it has {field_names(record)}. For records with "
            "one answer, set train.task=sft"
        )
    for name in _PAIR:
        if record.get(name) is None:
            raise NothingToLearn(f"{name} is {'null' if name in record else 'missing'}")
    texts = [record[name] for name in _PAIR]
    answers = [_messages(record[name], "assistant", name) for name in _PAIR]
    prompt = _prompt(record, answers)
    if not prompt and all(isinstance(text, str) for text in texts):
        chosen, rejected = _plain_pair(parser, *texts)
    else:
        with_prompt = [
            _conversation(parser, record, [*prompt, *answer], name) for name, answer in zip(_PAIR, answers, strict=True)
        ]
        common = _common_turns(*with_prompt)
        counts = [len(answer) if prompt else len(with_prompt[at].turns) - common for at, answer in enumerate(answers)]
        chosen, rejected = map(_learned_at_end, with_prompt, counts)
    _require_text(chosen, "chosen")
    _require_text(rejected, "rejected")
    if chosen == rejected:
        raise RecordError("chosen and rejected are equal. Remove the record")
    return Preference((chosen, rejected), _margin(record.get("margin")))


def _labelled(parser: RecordParser, record: Mapping[str, Any]) -> Preference:
    label, completion = record.get("label"), record.get("completion")
    if "completion" not in record or label is None:
        raise RecordError(f"the record has no completion with a label; it has {field_names(record)}")
    if completion is None:
        raise NothingToLearn("completion is null")
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise RecordError(f"label is {label!r:.80}, expected true or false")
    answer = _messages(completion, "assistant", "completion")
    prompt = _prompt(record, [answer])
    if not prompt:
        raise RecordError("the record has a completion, but no prompt")
    conversation = _learned_at_end(_conversation(parser, record, [*prompt, *answer], "completion"), len(answer))
    _require_text(conversation, "completion")
    return Preference((conversation,), float(label))


def _prompt(record: Mapping[str, Any], answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the messages of the prompt; [] if the record has none, or its answers repeat a text prompt."""
    name = next((name for name in _PROMPTS if record.get(name) is not None), None)
    if name is None:
        return []
    # Some datasets, such as ultrafeedback_binarized, have the question in their answers too.
    roles = [turn.get("role") for answer in answers for turn in answer]
    if isinstance(record[name], str) and not {"user", "human"}.isdisjoint(roles):
        return []
    return _messages(record[name], "user", name)


def _messages(value: Any, role: str, name: str) -> list[Any]:
    """Return a text, a turn or turns as chat messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise RecordError(f"{name} is {json_type(value)}, expected a text or messages")
    return [{_MESSAGE_FIELDS.get(field, field): item for field, item in turn.items()} for turn in turns]


def _conversation(parser: RecordParser, record: Mapping[str, Any], messages: list[Any], name: str) -> Conversation:
    """Parse messages with the record's tools and system text. Media without markers precede the first question."""
    shared = {part: record[part] for part in ("system", "tools") if record.get(part) is not None}
    with errors_start_with(f"{name}: "):
        conversation = parser.conversation({"messages": messages, **shared})
    media, turns = media_first(parser.media, parser.visuals), conversation.turns
    at = next((at for at, turn in enumerate(turns) if turn.role == "user"), None)
    if not media or at is None or any(part.kind != "text" for turn in turns for part in turn.parts):
        return conversation
    if marker := special_marker(turns[at].text):
        raise RecordError(f"a typed text has {marker}, and typed text is literal. Make it a typed part")
    turn = replace(turns[at], parts=(*media, *turns[at].parts))
    return replace(conversation, turns=(*turns[:at], turn, *turns[at + 1 :]))


def _plain_pair(parser: RecordParser, chosen: str, rejected: str) -> tuple[Conversation, ...]:
    """Return two texts as captions of the media, or as plain texts whose common words have no loss."""
    answers = parser.caption(chosen), parser.caption(rejected)
    words = re.match(r"(.+)\s", os.path.commonprefix([chosen, rejected]), re.DOTALL)
    if words is None or answers[0].turns[0].role != "plain":
        return answers
    prompt = Turn("plain", (Part("text", words[1]),), has_loss=False)
    rest = [Turn("plain", (Part("text", text[words.end(1) :]),)) for text in (chosen, rejected)]
    return tuple([Conversation((prompt, turn)) for turn in rest])


def _common_turns(chosen: Conversation, rejected: Conversation) -> int:
    """Return the number of equal turns at the start."""
    pairs = list(zip(chosen.turns, rejected.turns, strict=False))
    return next((at for at, (first, second) in enumerate(pairs) if first != second), len(pairs))


def _learned_at_end(conversation: Conversation, count: int) -> Conversation:
    """Return the conversation with loss on its last `count` turns only."""
    first = len(conversation.turns) - count
    turns = [replace(turn, has_loss=turn.has_loss and at >= first) for at, turn in enumerate(conversation.turns)]
    return replace(conversation, turns=tuple(turns))


def _require_text(answer: Conversation, name: str) -> None:
    if answer.is_blank:
        raise NothingToLearn(f"{name} is blank, or excluded from the loss")


def _margin(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecordError(f"margin is {value!r:.80}, expected a number")
    return float(value)
