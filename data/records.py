"""Records -> conversations: LLaVA `conversations`, chat `messages`, or a caption.

In LLaVA records and in string contents the markers `<image>` and `<audio>` are the places of the sample's pictures and
clips, in the order of the members in the shard; of typed content parts the type says so, and their text is literal.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from data.errors import RecordError

MARKERS = {"<image>": "image", "<audio>": "audio"}
_SPLIT = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
_PART_KINDS = {"image": "image", "image_url": "image", "audio": "audio", "input_audio": "audio", "audio_url": "audio"}


@dataclass(frozen=True)
class Part:
    """A piece of a turn: `kind` is "text", "image" or "audio"; `text` is empty for the last two."""

    kind: str
    text: str = ""


@dataclass(frozen=True)
class Turn:
    """`role`: user, assistant, system, or "plain" for a text without roles, all of which carries loss."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]

    def count(self, kind: str) -> int:
        """Number of "image" or "audio" parts."""
        return sum(part.kind == kind for turn in self.turns for part in turn.parts)


def parse_record(raw: bytes, extension: str, key: str, media: dict[str, int]) -> Conversation:
    """The record of a sample -> its conversation.

    raw: bytes of the `json` or `txt` member; extension: which of the two (its last part counts);
    media: number of members of each kind that the run uses, e.g. {"image": 2}. A kind that is absent is not used by any
    module: then the record must not refer to it.

    Raises RecordError: unreadable, of no known form, without an assistant turn, or with a number of placeholders that
    differs from the number of members.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"key {key!r}: the .{extension} member is not UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    if extension.rpartition(".")[2] == "txt":
        conversation = _caption(text, media)
    else:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"key {key!r}: the .{extension} member is not JSON ({error})") from error
        conversation = _from_json(record, key, media)
    for kind in sorted(set(MARKERS.values())):
        used = conversation.count(kind)
        if kind not in media and used:
            raise RecordError(
                f"key {key!r}: the record refers to {used} {kind} member(s), but no module of this run takes any"
            )
        if used != media.get(kind, 0):
            raise RecordError(
                f"key {key!r}: the record has {used} {kind} placeholder(s), but the sample has {media[kind]} {kind} "
                "member(s)"
            )
    return conversation


def _from_json(record: Any, key: str, media: dict[str, int]) -> Conversation:
    if not isinstance(record, dict):
        raise RecordError(f"key {key!r}: the record is a JSON {type(record).__name__}, not an object")
    for field, role_field, content_field in (("conversations", "from", "value"), ("messages", "role", "content")):
        if field not in record:
            continue
        turns = record[field]
        if not isinstance(turns, list) or not turns:
            raise RecordError(f"key {key!r}: {field} is not a list of turns")
        built = tuple(
            _turn(turn, role_field, content_field, f"key {key!r}: {field}[{at}]") for at, turn in enumerate(turns)
        )
        if not any(turn.role == "assistant" for turn in built):
            raise RecordError(f"key {key!r}: {field} has no assistant turn, so there is nothing to learn from it")
        return Conversation(built)
    for field in ("caption", "text"):
        if isinstance(record.get(field), str):
            return _caption(record[field], media)
    raise RecordError(
        f"key {key!r}: the record has none of conversations, messages, caption, text; it has "
        f"{sorted(map(str, record))[:8]}"
    )


def _turn(turn: Any, role_field: str, content_field: str, where: str) -> Turn:
    if not isinstance(turn, dict) or role_field not in turn or content_field not in turn:
        raise RecordError(f"{where} is not an object with {role_field!r} and {content_field!r}")
    name = turn[role_field]
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RecordError(f"{where}: unknown role {name!r}; known are {', '.join(_ROLES)}")
    content = turn[content_field]
    if isinstance(content, str):
        return Turn(role, _split_markers(content))
    if role_field == "role" and isinstance(content, list):
        return Turn(role, tuple(_typed_part(part, where) for part in content))
    raise RecordError(f"{where}: {content_field} is neither text nor a list of typed parts")


def _typed_part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return Part("text", part["text"])
    if isinstance(kind, str) and kind in _PART_KINDS:
        return Part(_PART_KINDS[kind])
    raise RecordError(f"{where}: unknown content part {str(part)[:80]}; known types are text, {', '.join(_PART_KINDS)}")


def _split_markers(text: str) -> tuple[Part, ...]:
    pieces = (piece for piece in _SPLIT.split(text) if piece)
    return tuple(Part(MARKERS[piece]) if piece in MARKERS else Part("text", piece) for piece in pieces)


def _caption(text: str, media: dict[str, int]) -> Conversation:
    """Media first, as a user turn, then the caption as the assistant's; text alone is one plain turn."""
    first = tuple(Part(kind) for kind in sorted(media, reverse=True) for _ in range(media[kind]))  # images, then audio
    if not first:
        return Conversation((Turn("plain", (Part("text", text),)),))
    return Conversation((Turn("user", first), Turn("assistant", (Part("text", text),))))
