"""Parse records as conversations: LLaVA `conversations`, chat `messages`, or a caption.

In LLaVA records and text contents, `<image>`, `<video>` and `<audio>` mark the media of the sample, in member order.
An unknown marker, such as `<speech>`, makes the sample bad, and so does any marker in a caption of a run with media.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from data.errors import NothingToLearn, RecordError, UnknownRecord
from data.media.options import BOUNDS, Bounds
from data.records.conversation import (
    KINDS,
    MARKERS,
    NO_FIELDS,
    PART_KINDS,
    Conversation,
    Part,
    Turn,
    Visual,
    media_first,
    split_markers,
    with_frames,
    with_media,
)
from data.records.markers import require_no_marker, with_our_markers
from data.records.members import ABSENT, CONVERSATIONS, LEARNED, PREFERENCES, REJECTED, Fields
from data.records.record_checks import (
    NO_OTHER_MEMBERS,
    OtherMembers,
    require_characters,
    require_download,
    require_files,
    split_loss,
    text_of_file,
)
from data.text_format import Key, plural, shown

_TURN_FIELDS = {"conversations": ("from", "value"), "messages": ("role", "content")}
"""Name of the turns -> their fields for role and content."""
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"} | {
    role: role for role in ("user", "assistant", "system", "tool", "function", "developer")
}
"""Names of roles in records -> roles."""
_LONGEST = 80  # characters of a value in a message


def parse_record(
    raw: bytes,
    extension: str,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    others: OtherMembers = NO_OTHER_MEMBERS,
    visuals: Sequence[Visual] = (),
) -> Conversation:
    """Parse a sample's record as a conversation, with videos as images.

    Args:
        raw: bytes of the `json` or `txt` member.
        extension: extension of this member; its last part counts.
        media: kind -> number of members that the run uses, e.g. {"image": 2}. The record must not refer to other kinds.
        others: names of these members, and of unread members.
        visuals: images and videos of the sample in order; optional without a video.

    Raises:
        RecordError: it is invalid, above its bounds, without an assistant turn, or does not match the members.
        NothingToLearn: the caption is null.
        NotDownloaded: the sample has no media because their download failed.
    """
    parser = RecordParser(media, bounds, visuals)
    with errors_start_with(f"key {key!r}: "):
        record = parser.record(raw, extension)
        if isinstance(record, str):
            conversation = parser.caption(record)
        else:
            require_download(record, media)
            require_turns(record)
            conversation = parser.conversation(record)
            require_files(record, key, others, media)
        parser.check(conversation)
    return with_frames(conversation, visuals, key)


def parse_fields(
    raws: Mapping[str, bytes],
    fields: Fields,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    visuals: Sequence[Visual] = (),
) -> Conversation:
    """Parse the record that `data.fields` describes. See `parse_record`.

    The first text of conversations, messages, answer, caption, text and label counts. A question precedes the last
    four. Media without markers precede the question.

    Args:
        raws: extension -> bytes of the sample's members with texts.

    Raises the errors of `parse_record`, and RecordError if a named text is missing.
    """
    parser = RecordParser(media, bounds, visuals)
    with errors_start_with(f"key {key!r}: "):
        record = parser.record_of_fields(raws, fields)
        require_turns(record)
        if name := next((name for name in PREFERENCES if name in record), None):
            raise RecordError(f"{fields.key}.{name}: train.task=sft does not read it. Name question and answer")
        if turns := next((name for name in CONVERSATIONS if record.get(name) is not None), None):
            kept = {name: record[name] for name in (turns, "system", "tools") if record.get(name) is not None}
            conversation = parser.conversation(kept)
        else:
            conversation = parser.question_and_answer(record, fields)
        parser.check(conversation)
    return with_frames(conversation, visuals, key)


def form_of(record: Any) -> str:
    """Return "pairs" or "labels" for a record of preferences, "turns" for any other."""
    if not isinstance(record, dict):
        return "turns"
    names = {name for name, value in record.items() if value is not None}
    if names & {"chosen", *REJECTED}:
        return "pairs"
    has_label = isinstance(record.get("label"), bool) or "kto_tag" in names
    return "labels" if has_label and names & {"completion", "output", *CONVERSATIONS} else "turns"


def require_turns(record: Any) -> None:
    """Raise RecordError for a record of preferences, of which only a part would be learned."""
    if (form := form_of(record)) != "turns":
        names = [name for name in ("chosen", *REJECTED, "label", "kto_tag") if record.get(name) is not None]
        raise RecordError(
            f"{' and '.join(names)}: a record of preferences, which train.task=sft and evaluate do not read. Train "
            f"on it with train.task={'dpo' if form == 'pairs' else 'kto'}, or set data.fields to what is learned"
        )


@contextmanager
def errors_start_with(prefix: str) -> Iterator[None]:
    """Put a prefix before the message of any RecordError."""
    try:
        yield
    except RecordError as error:
        raise type(error)(f"{prefix}{error}") from error


@dataclass(frozen=True)
class RecordParser:
    """Parses the record of one sample. Errors do not name the sample."""

    media: Mapping[str, int]
    bounds: Bounds
    visuals: Sequence[Visual]

    def decode(self, raw: bytes, extension: str) -> str:
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecordError(
                f"the .{shown(extension)} member is not UTF-8 ({error.reason} at byte {error.start})"
            ) from error

    def record(self, raw: bytes, extension: str) -> Any:
        """Return the text of a `txt` member, or the value of a `json` member."""
        text = self.decode(raw, extension)
        if extension.rpartition(".")[2] == "txt":
            return text_of_file(text)
        return self.json(text, f"the .{shown(extension)} member")

    def json(self, text: str, what: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{what} is not JSON ({error})") from error

    def record_of_fields(self, raws: Mapping[str, bytes], fields: Fields) -> dict[str, Any]:
        """Return the values in `data.fields`. Raises RecordError if one is missing, NotDownloaded."""
        record, members = self.named_values(raws, fields)
        for member in members.values():
            require_download(member, self.media)
        fields.require(
            record, {name: field_names(member) for name, member in members.items() if isinstance(member, dict)}
        )
        return record

    def named_values(self, raws: Mapping[str, bytes], fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values in `data.fields`, and their JSON members."""
        record: dict[str, Any] = {}
        members: dict[str, Any] = {}
        for name, source in fields.texts:
            if source.member not in raws:
                continue
            text = self.decode(raws[source.member], source.member)
            if not source.is_json:
                record[name] = text.strip() if name == "label" else text_of_file(text)
                continue
            if source.member not in members:
                members[source.member] = self.json(text, f"the .{shown(source.member)} member")
            value = source.value(members[source.member])
            if value is not ABSENT:
                record[name] = value
        return record, members

    def conversation(self, record: Any) -> Conversation:
        if not isinstance(record, dict):
            raise RecordError(f"the record is a JSON {type(record).__name__}, not an object")
        if name := next((name for name in CONVERSATIONS if name in record), None):
            turns = _with_system(record, self.turns(record[name], name))
            return Conversation(turns, self.tools(record.get("tools")))
        captions = [name for name in ("caption", "text") if name in record]
        for name in captions:
            if isinstance(record[name], str):
                return self.caption(record[name])
        for name in captions:
            error = NothingToLearn if record[name] is None else RecordError
            raise error(f"{name} is {json_type(record[name])}, not a text")
        raise UnknownRecord(
            f"the record has none of conversations, messages, caption, text; it has {field_names(record)}"
        )

    def turns(self, turns: Any, name: str) -> tuple[Turn, ...]:
        if not isinstance(turns, list) or not turns:
            raise RecordError(f"{name} is {'an empty list' if turns == [] else json_type(turns)}, not a list of turns")
        role_field, content_field = _TURN_FIELDS[name]
        with errors_start_with(name):
            turns = with_our_markers(turns, role_field, content_field, self.media)
        parsed = []
        for at, turn in enumerate(turns):
            try:
                parsed.append(_turn(turn, role_field, content_field))
            except RecordError as error:
                raise RecordError(f"{name}[{at}]{error}") from None
        if not any(turn.role == "assistant" for turn in parsed):
            raise RecordError(f"{name} has no assistant turn, so there is nothing to learn from it")
        return tuple(parsed)

    def tools(self, tools: Any) -> tuple[Any, ...]:
        """Parse tools: a list of JSON schemas, or its JSON text."""
        if isinstance(tools, str) and tools:
            tools = self.json(tools, "tools, a text,")
        if not tools:
            return ()
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RecordError("tools is not a list of objects, one for each tool")
        return tuple(tools)

    def caption(self, text: str) -> Conversation:
        """Return media as the user turn and the caption as the answer, or one plain turn without media."""
        if self.media:
            require_no_marker(text, "the caption", {}, has_media=True)
        answer = (Part("text", text),)
        if first := media_first(self.media, self.visuals):
            return Conversation((Turn("user", first), Turn("assistant", answer)))
        return Conversation((Turn("plain", answer),))

    def question_and_answer(self, record: dict[str, Any], fields: Fields) -> Conversation:
        answers = [name for name in LEARNED if name in record]
        name = next((name for name in answers if record[name] is not None), None)
        if name is None:
            raise NothingToLearn(f"{fields.key}: {' and '.join(answers)} is null")
        answer, question = record[name], record.get("question")
        if name == "label" and isinstance(answer, int) and not isinstance(answer, bool):
            answer = str(answer)
        for field, text in ((name, answer), ("question", question)):
            if text is not None and not isinstance(text, str):
                raise RecordError(f"{fields.key}.{field}: is {json_type(text)}, not a text")
        if question is None:
            turns = self.caption(answer).turns
            if record.get("system") and turns[0].role == "plain":
                raise RecordError(f"{fields.key}.system: a text alone has no place for a system text")
        else:
            with errors_start_with("question"):
                (asked,) = with_our_markers([{"from": "human", "value": question}], "from", "value", self.media)
            require_no_marker(asked["value"], "question", MARKERS)
            require_no_marker(answer, name, {}, has_media=bool(self.media))
            parts = with_media(asked["value"], self.media, self.visuals)
            turns = Turn("user", parts), Turn("assistant", (Part("text", answer),))
        return Conversation(_with_system(record, turns))

    def check(self, conversation: Conversation) -> None:
        """Raise RecordError unless placeholders and members of each kind are equally many."""
        require_characters(conversation)
        kinds = [part.kind for turn in conversation.turns for part in turn.parts]
        # Numbered images may be the frames of a video.
        counted = KINDS if self.media.get("video") or "video" not in kinds else ("audio",)
        for kind in KINDS:
            used, members = kinds.count(kind), self.media.get(kind, 0)
            if used and ("image" if kind == "video" else kind) not in self.media:
                raise RecordError(
                    f"the record refers to {plural(used, f'{kind} member')}, but no module of this run takes any"
                )
            if kind in counted and used != members:
                raise RecordError(
                    f"the record has {plural(used, f'{kind} placeholder')}, but the sample has "
                    f"{plural(members, f'{kind} member')}"
                )


def _turn(turn: Any, role_field: str, content_field: str) -> Turn:
    """Parse a turn. A RecordError's message continues the name of the turn."""
    if (
        not isinstance(turn, dict)
        or role_field not in turn
        or (content_field not in turn and not turn.get("tool_calls"))
    ):
        raise RecordError(f" is not an object with {role_field!r} and {content_field!r}")
    name = turn[role_field]
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RecordError(f": unknown role {_cut(name)}; known are {', '.join(ROLES)}")
    content, fields, has_loss = turn.get(content_field), NO_FIELDS, True
    if len(turn) > 2 or content_field not in turn:
        others = turn.keys() - {role_field, content_field}
        fields = {name: value for name, value in turn.items() if name in others and value is not None}
        fields, has_loss = split_loss(fields, role)
    if isinstance(content, str):
        require_no_marker(content, "", MARKERS)
        parts = split_markers(content)
        length = sum([len(part.text) if part.kind == "text" else len(part.kind) + 2 for part in parts])
        return Turn(role, parts, fields, has_loss=has_loss, has_separators=length < len(content))
    if role_field == "role" and isinstance(content, list):
        return Turn(role, tuple([_typed_part(part) for part in content]), fields, typed=True, has_loss=has_loss)
    if content is None and turn.get("tool_calls"):
        return Turn(role, (), fields, typed=None, has_loss=has_loss)
    raise RecordError(f": {content_field} is {json_type(content)}, neither text nor a list of typed parts")


def _typed_part(part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return Part("text", part["text"])
    if isinstance(kind, str) and kind in PART_KINDS:
        return Part(PART_KINDS[kind])
    raise RecordError(f": unknown content part {_cut(part)}; known types are text, {', '.join(PART_KINDS)}")


def _with_system(record: dict[str, Any], turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    text = record.get("system")
    if text is None or text == "":
        return turns
    if not isinstance(text, str):
        raise RecordError(f"system is {json_type(text)}, not a text")
    require_no_marker(text, "system", {})
    if turns[0].role == "system":
        raise RecordError("the record has a system text and a system turn. Remove one of them")
    return (Turn("system", (Part("text", text),)), *turns)


def json_type(value: Any) -> str:
    """Return the JSON type of a value with its article, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def field_names(record: Mapping[str, Any]) -> list[str]:
    """Return the first fields of a record, for messages."""
    return sorted(name[:_LONGEST] for name in record)[:8]


def _cut(value: Any) -> str:
    return repr(value[:_LONGEST] if isinstance(value, str) else value)[: _LONGEST + 2]
