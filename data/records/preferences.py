"""Parse records of preferences: pairs of a chosen and a rejected answer, or an answer with a label.

The forms are those of TRL, ms-swift and LLaMA-Factory; `docs/data.md` has a table of them.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from data.errors import NothingToLearn, RecordError
from data.media.options import BOUNDS, Bounds
from data.records.conversation import Conversation, Part, Turn, Visual, media_first, with_frames
from data.records.markers import special_marker
from data.records.members import CONVERSATIONS, REJECTED, Fields
from data.records.record_checks import NO_OTHER_MEMBERS, OtherMembers, require_download, require_files
from data.records.records import RecordParser, errors_start_with, field_names, form_of, json_type, parse_record
from data.text_format import Key

_REJECTED_MEDIA = {f"rejected_{name}": name for name in ("images", "videos", "audios")}
_PROMPTS = ("prompt", "question", *CONVERSATIONS)
_LABELS = ("label", "kto_tag")
_MESSAGE_FIELDS = {"from": "role", "value": "content"}
_USERS = ("user", "human")


@dataclass(frozen=True)
class Preference:
    """The answers of a record. Only turns of the answer itself have loss, not those of its prompt."""

    answers: tuple[Conversation, ...]
    """(chosen, rejected), or (answer,) of a record with a label."""
    target: float = math.nan
    """Of a label: 1 if desirable, else 0. Of a pair: its margin, or nan."""


class _Answer(NamedTuple):
    """An answer as raw chat messages."""

    name: str
    prompt: list[Any]
    """[] if the messages contain it."""
    messages: list[Any]


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

    A text prompt is a user turn and a text answer an assistant turn. Two texts without prompt and media are plain
    texts, whose common words are the prompt. Media without markers precede the first question.

    Raises:
        RecordError: an error of `parse_record`; a record of another form; or equal answers.
        NothingToLearn: an answer is null or blank.
    """
    parser = RecordParser(media, bounds, visuals)
    with errors_start_with(f"key {key!r}: "):
        record = parser.record(raw, extension)
        require_download(record, media)
        preference = parse_answers(parser, record, form)
        if isinstance(record, dict):
            require_files(record, key, others, media)
    return _with_frames(preference, visuals, key)


def parse_preference_fields(
    raws: Mapping[str, bytes],
    fields: Fields,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    visuals: Sequence[Visual] = (),
    *,
    form: str,
) -> Preference:
    """Parse the preference that `data.fields` describes. See `parse_preference` and `parse_fields`."""
    parser = RecordParser(media, bounds, visuals)
    with errors_start_with(f"key {key!r}: "):
        preference = parse_answers(parser, parser.record_of_fields(raws, fields), form)
    return _with_frames(preference, visuals, key)


def _with_frames(preference: Preference, visuals: Sequence[Visual], key: Key) -> Preference:
    return replace(preference, answers=tuple([with_frames(answer, visuals, key) for answer in preference.answers]))


def parse_any(
    raw: bytes,
    extension: str,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    others: OtherMembers = NO_OTHER_MEMBERS,
    visuals: Sequence[Visual] = (),
) -> Preference:
    """Parse a record of any form, for tools that know no task. See `parse_preference`."""
    arguments = raw, extension, key, media, bounds, others, visuals
    parser = RecordParser(media, bounds, visuals)
    with errors_start_with(f"key {key!r}: "):
        form = form_of(parser.record(raw, extension))
    return Preference((parse_record(*arguments),)) if form == "turns" else parse_preference(*arguments, form=form)


def parse_answers(parser: RecordParser, record: Any, form: str) -> Preference:
    """Parse a record of a form, "pairs" or "labels". Videos stay videos. Errors do not name the sample."""
    if not isinstance(record, dict):
        raise RecordError(f"the record is {json_type(record)}, not an object with {form}")
    record = {name: value for name, value in record.items() if value is not None}  # a table has all columns
    if "chat_template_kwargs" in record:
        raise RecordError("chat_template_kwargs are not supported. Remove them, and set data.chat_template")
    preference = (_pair if form == "pairs" else _labelled)(parser, record)
    for answer in preference.answers:
        parser.check(answer)
    return preference


def _pair(parser: RecordParser, record: Mapping[str, Any]) -> Preference:
    answers = chosen, rejected = _answers_of_pair(record)
    texts = [text for name in ("chosen", "rejected") if isinstance(text := record.get(name), str)]
    if not chosen.prompt and len(texts) == 2:
        conversations = _plain_pair(parser, *texts)
    else:
        with_prompt = [_conversation(parser, record, answer) for answer in answers]
        common = _common_turns(*with_prompt)
        conversations = tuple(
            _learned_at_end(conversation, len(answer.messages) if answer.prompt else len(conversation.turns) - common)
            for answer, conversation in zip(answers, with_prompt, strict=True)
        )
    if conversations[0].turns == conversations[1].turns:
        raise RecordError(f"{chosen.name} and {rejected.name} are equal. Remove the record")
    for answer, conversation in zip(answers, conversations, strict=True):
        _require_text(conversation, answer.name)
    return Preference(conversations, _margin(record.get("margin")))


def _answers_of_pair(record: Mapping[str, Any]) -> tuple[_Answer, _Answer]:
    for name, shared in _REJECTED_MEDIA.items():
        if record.get(name) not in (None, record.get(shared)):
            raise RecordError(f"{name} differs from {shared}. Both answers of a pair must have the same media")
    rejected = [name for name in REJECTED if name in record]
    if len(rejected) > 1:
        raise RecordError(f"{' and '.join(rejected)} are different names of the rejected answer. Keep one of them")
    if not rejected and "chosen" not in record:
        raise RecordError(
            f"the record has no pair of answers (chosen and rejected); it has {field_names(record)}. For records with "
            "one answer, set train.task=sft"
        )
    if rejected == ["rejected_response"]:
        name, turns = _turns(record)
        prompt, chosen = _split_at_question(name, turns)
        other = _messages(record["rejected_response"], "assistant", "rejected_response")
        if any(turn.get("role") in _USERS for turn in other):
            raise RecordError("rejected_response has a user turn. Set rejected_messages to the complete conversation")
        return _Answer(name, prompt, chosen), _Answer("rejected_response", prompt, other)
    if rejected == ["rejected_messages"]:
        name, turns = _turns(record)
        other = _messages(record["rejected_messages"], "assistant", "rejected_messages")
        return _Answer(name, [], turns), _Answer("rejected_messages", [], other)
    for name in ("chosen", "rejected"):
        if name not in record:
            raise NothingToLearn(f"{name} is null or missing")
    answers = {name: _messages(record[name], "assistant", name) for name in ("chosen", "rejected")}
    prompt = _prompt(record, [*answers.values()])
    first, second = (_Answer(name, prompt, messages) for name, messages in answers.items())
    return first, second


def _labelled(parser: RecordParser, record: Mapping[str, Any]) -> Preference:
    names = [name for name in _LABELS if name in record]
    if not names or form_of(record) == "pairs":
        raise RecordError(
            f"the record has no answer with a label; it has {field_names(record)}. Set train.task=dpo for pairs, or "
            "train.task=sft for records with one answer"
        )
    label = record[names[0]]
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise RecordError(f"{names[0]} is {label!r:.80}, expected true or false")
    name = next((name for name in ("completion", "output") if name in record), None)
    if name is not None:
        messages = _messages(record[name], "assistant", name)
        answer = _Answer(name, _prompt(record, [messages]), messages)
    elif any(name in record for name in CONVERSATIONS):
        name, turns = _turns(record)
        answer = _Answer(name, *_split_at_question(name, turns))
    else:
        raise NothingToLearn("completion is null or missing")
    if not answer.prompt:
        raise RecordError(f"{answer.name}: has no prompt before it. Add prompt")
    conversation = _learned_at_end(_conversation(parser, record, answer), len(answer.messages))
    _require_text(conversation, answer.name)
    return Preference((conversation,), float(label))


def _prompt(record: Mapping[str, Any], answers: Sequence[list[Any]]) -> list[Any]:
    """Return the messages of the prompt; [] if the record has none, or the answers repeat it."""
    name = next((name for name in _PROMPTS if name in record), None)
    if name is None:
        return _instruction(record) if "instruction" in record else []
    prompt = _messages(record[name], "user", name)
    # Some datasets, such as ultrafeedback_binarized, have the question in their answers too.
    is_repeated = all(answer[: len(prompt)] == prompt for answer in answers)
    begin_with_question = all(_first_role(answer) in _USERS for answer in answers)
    return [] if is_repeated or (isinstance(record[name], str) and begin_with_question) else prompt


def _first_role(messages: Sequence[Any]) -> Any:
    return next((role for turn in messages if (role := turn.get("role")) != "system"), None)


def _instruction(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages of an Alpaca record."""
    texts = [record["instruction"], record.get("input", "")]
    history = record.get("history", [])
    if not all(isinstance(text, str) for text in texts):
        raise RecordError("instruction and input must be texts")
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RecordError("history must be a list of [question, answer]")
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
    return [*turns, {"role": "user", "content": "\n".join(filter(None, texts))}]


def _turns(record: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the name of a conversation and its messages, which end in an answer."""
    name = next((name for name in CONVERSATIONS if name in record), None)
    if name is None:
        raise RecordError(f"the record has no messages with the other answer; it has {field_names(record)}")
    return name, _messages(record[name], "user", name)


def _split_at_question(name: str, messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages up to the last user turn, and the answer after it."""
    last = max((at for at, turn in enumerate(messages) if turn.get("role") in _USERS), default=-1) + 1
    if last == len(messages):
        raise RecordError(f"{name} ends in a user turn, so it has no answer")
    return messages[:last], messages[last:]


def _messages(value: Any, role: str, name: str) -> list[Any]:
    """Return a text, a turn or turns as chat messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise RecordError(f"{name} is {json_type(value)}, expected a text or messages")
    return [{_MESSAGE_FIELDS.get(field, field): item for field, item in turn.items()} for turn in turns]


def _conversation(parser: RecordParser, record: Mapping[str, Any], answer: _Answer) -> Conversation:
    """Parse an answer after its prompt, with the record's tools and system text. Media without markers precede the
    first question."""
    shared = {part: record[part] for part in ("system", "tools") if part in record}
    if answer.name.startswith("rejected") and "rejected_tools" in record:
        shared["tools"] = record["rejected_tools"]
    with errors_start_with(f"{answer.name}: "):
        conversation = parser.conversation({"messages": [*answer.prompt, *answer.messages], **shared})
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
