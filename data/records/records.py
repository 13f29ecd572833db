"""Records -> conversations: LLaVA `conversations`, chat `messages`, or a caption.

In LLaVA records and in string contents the markers `<image>`, `<video>` and `<audio>` are the places of the sample's
media, in the order of the members in the shard; of typed content parts the type says so, and their text is literal.
Tools of a record, and what a message has besides its role and content, are kept for chat templates.

A marker of a medium that nothing takes, such as `<speech>`, is never text: the sample is bad. In a caption no marker
is, where the run has media.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import NothingToLearn, RecordError, UnknownRecord
from data.media.bounds import BOUNDS, Bounds
from data.records.conversation import (
    KINDS,
    MARKERS,
    NO_FIELDS,
    Conversation,
    Part,
    Turn,
    media_first,
    split_markers,
    with_frames,
    with_media,
)
from data.records.fields import ABSENT, LEARNED, Fields
from data.records.file_references import ALONE, Beside, misfit, stray_marker
from data.records.foreign_markers import special_marker, with_our_markers
from data.records.message_loss import split_loss
from data.records.record_checks import require_characters, require_download, text_of_file
from data.samples.frames import Picture
from data.text_format import Key, plural, shown

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "function",
    "developer": "developer",
}
PART_KINDS = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
}
"""Type of a content part -> kind of its medium."""
_SHOWN = 80  # characters of a value in a message


def parse_record(
    raw: bytes,
    extension: str,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    beside: Beside = ALONE,
    pictures: Sequence[Picture] = (),
) -> Conversation:
    """The record of a sample -> its conversation, in which videos are their pictures.

    raw: bytes of the `json` or `txt` member; extension: which of the two (its last part counts);
    media: number of members of each kind that the run uses, e.g. {"image": 2}. A kind that is absent is not used by any
    module: then the record must not refer to it. beside: the names of these members, and those that are not read.
    pictures: the pictures and videos among them, in their order; may be left out where there is no video.

    Raises RecordError: unreadable, of no known form, above its bounds, without an assistant turn, with a number of
    placeholders that differs from the number of members, or referring to what is not read; NothingToLearn: its caption
    is null; NotDownloaded: it has no media because their download failed.
    """
    text = _decoded(raw, extension, key, bounds)
    if extension.rpartition(".")[2] == "txt":
        return _checked(_caption(text_of_file(text), media, pictures, key), key, media, pictures, bounds)
    record = _json(text, f"key {key!r}: the .{shown(extension)} member", bounds)
    return _of_record(record, key, media, bounds, beside, pictures)


def parse_made(
    record: dict[str, Any],
    raw: bytes,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    beside: Beside = ALONE,
    pictures: Sequence[Picture] = (),
) -> Conversation:
    """`parse_record` of a `json` member that was just made: `raw` is the JSON of `record`, and is not read again."""
    _require_bytes(raw, "json", key, bounds)
    _require_depth(record, raw.count(b"[") + raw.count(b"{"), f"key {key!r}: the .json member", bounds)
    return _of_record(record, key, media, bounds, beside, pictures)


def parse_fields(
    raws: Mapping[str, bytes],
    fields: Fields,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    pictures: Sequence[Picture] = (),
) -> Conversation:
    """`parse_record` where `data.fields` says what the record is.

    raws: bytes of the members that hold texts, by extension, as far as the sample has them.

    Of what a sample has, the first counts: conversations, messages, answer, caption, text, label. A question goes
    before the last four, behind the media where it does not mark their places.

    Raises what `parse_record` does, RecordError where the sample lacks a text that is named.
    """
    record: dict[str, Any] = {}
    parsed: dict[str, Any] = {}
    for name, source in fields.texts:
        if source.member not in raws:
            continue
        text = _decoded(raws[source.member], source.member, key, bounds)
        if not source.is_json:
            record[name] = text.strip() if name == "label" else text_of_file(text)
            continue
        if source.member not in parsed:
            parsed[source.member] = _json(text, f"key {key!r}: the .{shown(source.member)} member", bounds)
        value = source.value(parsed[source.member])
        if value is not ABSENT:
            record[name] = value
    for one in parsed.values():
        require_download(one, key, media)
    try:
        fields.require(record, {name: _keys(one) for name, one in parsed.items() if isinstance(one, dict)})
    except RecordError as error:
        raise RecordError(f"key {key!r}: {error}") from None
    for name in ("conversations", "messages"):
        if record.get(name) is not None:
            kept = {one: record[one] for one in (name, "system", "tools") if record.get(one) is not None}
            conversation = _from_json(kept, key, media, pictures, bounds)
            return _checked(conversation, key, media, pictures, bounds)
    answers = [name for name in LEARNED if name in record]
    answer = next((name for name in answers if record[name] is not None), None)
    if answer is None:
        raise NothingToLearn(f"key {key!r}: {fields.key}: {' and '.join(answers)} is null")
    value = record[answer]
    if answer == "label" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    question = record.get("question")
    for name, one in ((answer, value), ("question", question)):
        if one is not None and not isinstance(one, str):
            raise RecordError(f"key {key!r}: {fields.key}.{name}: is {_called(one)}, not a text")
    if question is None:
        turns = _caption(value, media, pictures, key).turns
        if record.get("system") and turns[0].role == "plain":
            raise RecordError(f"key {key!r}: {fields.key}.system: a text alone has no place for a system text")
        conversation = Conversation(_with_system(record, turns, key))
    else:
        try:
            question = with_our_markers([{"from": "human", "value": question}], "from", "value", media)[0]["value"]
        except RecordError as error:
            raise RecordError(f"key {key!r}: question{error}") from None
        _refuse_stray(question, f"key {key!r}: question", MARKERS)
        _refuse_stray(value, f"key {key!r}: {answer}", {}, has_media=bool(media))
        turns = Turn("user", with_media(question, media, pictures)), Turn("assistant", (Part("text", value),))
        conversation = Conversation(_with_system(record, turns, key))
    return _checked(conversation, key, media, pictures, bounds)


def _of_record(
    record: Any,
    key: Key,
    media: Mapping[str, int],
    bounds: Bounds,
    beside: Beside,
    pictures: Sequence[Picture],
) -> Conversation:
    require_download(record, key, media)
    conversation = _from_json(record, key, media, pictures, bounds)
    if wrong := misfit(record, key, beside, media):
        raise RecordError(f"key {key!r}: {wrong}")
    return _checked(conversation, key, media, pictures, bounds)


def _require_bytes(raw: bytes, extension: str, key: Key, bounds: Bounds) -> None:
    if above := bounds.of_record(len(raw)):
        raise RecordError(f"key {key!r}: the .{shown(extension)} member: {above}")


def _decoded(raw: bytes, extension: str, key: Key, bounds: Bounds) -> str:
    _require_bytes(raw, extension, key, bounds)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"key {key!r}: the .{shown(extension)} member is not UTF-8 ({error.reason} at byte {error.start})"
        ) from error


def _checked(
    conversation: Conversation, key: Key, media: Mapping[str, int], pictures: Sequence[Picture], bounds: Bounds
) -> Conversation:
    """The conversation with the pictures of its videos, if its placeholders are as many as the members."""
    require_characters(conversation, key)
    kinds = [part.kind for turn in conversation.turns for part in turn.parts]
    if above := bounds.of_placeholders(sum(kind != "text" for kind in kinds)):
        raise RecordError(f"key {key!r}: {above}")
    # Numbered pictures may be those of a video.
    counted = KINDS if media.get("video") or "video" not in kinds else ("audio",)
    for kind in KINDS:
        used = kinds.count(kind)
        if used and ("image" if kind == "video" else kind) not in media:
            raise RecordError(
                f"key {key!r}: the record refers to {plural(used, f'{kind} member')}, but no module of this "
                "run takes any"
            )
        if kind in counted and used != media.get(kind, 0):
            raise RecordError(
                f"key {key!r}: the record has {plural(used, f'{kind} placeholder')}, but the sample has "
                f"{plural(media.get(kind, 0), f'{kind} member')}"
            )
    return with_frames(conversation, pictures, key) if "video" in kinds else conversation


def _json(text: str, what: str, bounds: Bounds) -> Any:
    """What a text of JSON says."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what} is not JSON ({error})") from error
    _require_depth(record, text.count("[") + text.count("{"), what, bounds)
    return record


def _require_depth(record: Any, brackets: int, what: str, bounds: Bounds) -> None:
    # Of so few brackets none can be deeper.
    if brackets > bounds.record_depth and _is_deeper(record, bounds.record_depth):
        raise RecordError(f"{what}: lists and objects inside each other, above data.bounds.record_depth of them")


def _is_deeper(record: Any, depth: int) -> bool:
    level = [record]
    for _ in range(depth + 1):
        level = [one for one in level if isinstance(one, (dict, list))]
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return bool(level)


def _called(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _from_json(
    record: Any, key: Key, media: Mapping[str, int], pictures: Sequence[Picture], bounds: Bounds
) -> Conversation:
    if not isinstance(record, dict):
        raise RecordError(f"key {key!r}: the record is a JSON {type(record).__name__}, not an object")
    for name, role_field, content_field in (("conversations", "from", "value"), ("messages", "role", "content")):
        if name not in record:
            continue
        turns = record[name]
        if not isinstance(turns, list) or not turns:
            raise RecordError(
                f"key {key!r}: {name} is {'an empty list' if turns == [] else _called(turns)}, not a list of turns"
            )
        if above := bounds.of_turns(len(turns)):
            raise RecordError(f"key {key!r}: {name}: {above}")
        try:
            turns = with_our_markers(turns, role_field, content_field, media)
        except RecordError as error:
            raise RecordError(f"key {key!r}: {name}{error}") from None
        found = []
        for at, turn in enumerate(turns):
            try:
                found.append(_turn(turn, role_field, content_field))
            except RecordError as error:
                raise RecordError(f"key {key!r}: {name}[{at}]{error}") from None
        built = tuple(found)
        if "assistant" not in [turn.role for turn in built]:
            raise RecordError(f"key {key!r}: {name} has no assistant turn, so there is nothing to learn from it")
        if "system" in record:
            built = _with_system(record, built, key)
        return Conversation(built, _tools(record, key, bounds) if "tools" in record else ())
    captions = [name for name in ("caption", "text") if name in record]
    for name in captions:
        if isinstance(record[name], str):
            return _caption(record[name], media, pictures, key)
    if captions and record[captions[0]] is None:
        raise NothingToLearn(f"key {key!r}: {captions[0]} is null, not a text")
    if captions:
        raise RecordError(f"key {key!r}: {captions[0]} is {_called(record[captions[0]])}, not a text")
    raise UnknownRecord(
        f"key {key!r}: the record has none of conversations, messages, caption, text; it has {_keys(record)}"
    )


def _turn(turn: Any, role_field: str, content_field: str) -> Turn:
    """Raises RecordError with what goes on behind the place of the turn."""
    if (
        not isinstance(turn, dict)
        or role_field not in turn
        or (content_field not in turn and not turn.get("tool_calls"))
    ):
        raise RecordError(f" is not an object with {role_field!r} and {content_field!r}")
    name = turn[role_field]
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RecordError(f": unknown role {_cut(name)}; known are {', '.join(_ROLES)}")
    content, fields = turn.get(content_field), NO_FIELDS
    if len(turn) > 2 or content_field not in turn:
        fields = {
            name: value for name, value in turn.items() if name not in (role_field, content_field) and value is not None
        }
    fields, has_loss = split_loss(fields, role) if fields else (NO_FIELDS, True)
    if isinstance(content, str):
        _refuse_stray(content, "", MARKERS)
        parts = split_markers(content)
        left = sum([len(part.text) if part.kind == "text" else len(part.kind) + 2 for part in parts])
        return Turn(role, parts, fields, has_loss=has_loss, has_separators=left < len(content))
    if role_field == "role" and isinstance(content, list):
        return Turn(role, tuple([_typed_part(part) for part in content]), fields, typed=True, has_loss=has_loss)
    if content is None and turn.get("tool_calls"):
        return Turn(role, (), fields, typed=None, has_loss=has_loss)
    raise RecordError(f": {content_field} is {_called(content)}, neither text nor a list of typed parts")


def _with_system(record: dict[str, Any], turns: tuple[Turn, ...], key: Key) -> tuple[Turn, ...]:
    """The turns behind the record's own `system` text, if it has one."""
    text = record.get("system")
    if text is None or text == "":
        return turns
    if not isinstance(text, str):
        raise RecordError(f"key {key!r}: system is {_called(text)}, not a text")
    _refuse_stray(text, f"key {key!r}: system", {})
    if turns[0].role == "system":
        raise RecordError(f"key {key!r}: the record has a system text and a system turn too: remove one of them")
    return (Turn("system", (Part("text", text),)), *turns)


def _keys(record: Mapping[str, Any]) -> list[str]:
    """The first keys of a record, none of them too long."""
    return sorted(name[:_SHOWN] for name in record)[:8]


def _cut(value: Any) -> str:
    """A value of a record, on a line and not too much of it."""
    return repr(value[:_SHOWN] if isinstance(value, str) else value)[: _SHOWN + 2]


def _tools(record: dict[str, Any], key: Key, bounds: Bounds) -> tuple[Any, ...]:
    """Descriptions of tools: JSON schemas in a list, or that list as JSON text."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        tools = _json(tools, f"key {key!r}: tools, a text,", bounds)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(f"key {key!r}: tools is not a list of objects, one for each tool")
    return tuple(tools)


def _typed_part(part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return Part("text", part["text"])
    if isinstance(kind, str) and kind in PART_KINDS:
        return Part(PART_KINDS[kind])
    raise RecordError(f": unknown content part {_cut(part)}; known types are text, {', '.join(PART_KINDS)}")


def _caption(text: str, media: Mapping[str, int], pictures: Sequence[Picture], key: Key) -> Conversation:
    """Media first, as a user turn, then the caption as the assistant's; text alone is one plain turn."""
    if media:
        _refuse_stray(text, f"key {key!r}: the caption", {}, has_media=True)
    first = media_first(media, pictures)
    if not first:
        return Conversation((Turn("plain", (Part("text", text),)),))
    return Conversation((Turn("user", first), Turn("assistant", (Part("text", text),))))


def _refuse_stray(text: str, where: str, taken: Mapping[str, str], *, has_media: bool = False) -> None:
    """Raises RecordError for a marker that would be trained as text; where a run has media, also for one that another
    family writes as a special token."""
    if marker := stray_marker(text, taken) or (special_marker(text) if has_media else None):
        raise RecordError(
            f"{where}: {marker} marks the place of a medium, and nothing takes it there: remove it, or write the text "
            "as a typed part of a message, which is literal"
        )
