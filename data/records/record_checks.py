"""Checks of a record: its file names, failed downloads, invalid characters, loss fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.errors import NotDownloaded, RecordError
from data.records.conversation import Conversation
from data.records.members import OTHER_VIDEO, UNREADABLE, VIDEO
from data.text_format import Key, plural, shown

_VIDEO_FIELDS = ("video", "videos")
_VIDEO = VIDEO | UNREADABLE["video"] | OTHER_VIDEO
_MEDIA_FIELDS = {"image": ("image", "images"), "video": _VIDEO_FIELDS, "audio": ("audio", "audios")}

_LOSS_VALUES = dict.fromkeys(
    ("loss", "weight", "train", "training", "trainable", "loss_weight", "loss_scale", "loss_mask"), True
) | {"masked": False}
"""Message field -> True if a value of 1 includes the message in the loss (OpenAI, ms-swift, Axolotl, torchtune)."""
_PARTIAL_LOSS = ("train_detail", "training_detail")
LOSS_FIELDS = (*_LOSS_VALUES, *_PARTIAL_LOSS)


@dataclass(frozen=True)
class OtherMembers:
    """Members of a sample besides its record."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """kind -> extensions of the media that are read, in order."""
    unread: Sequence[str] = ()
    """Extensions of members that are unread although `data.fields` does not exclude them."""


NO_OTHER_MEMBERS = OtherMembers()


def require_files(record: Mapping[str, Any], key: Key, others: OtherMembers, media: Mapping[str, int]) -> None:
    """Compare the files that a record names with the members of its sample. `media`: kind -> members that the run uses.
    Raises RecordError for other files, another order, or unread files."""
    for kind, names in _MEDIA_FIELDS.items():
        if kind == "video" and not media.get(kind):
            continue  # the record may name the video of the sample's frames
        if kind in media and not record.keys().isdisjoint(names):
            _require_listed_files(record, key, kind, names, others, media[kind])
    unread = {name.lower() for name in others.unread}
    video = next((name for name in others.unread if name.rpartition(".")[2] in _VIDEO), None)
    for name, value in record.items() if unread else ():
        if video and name in _VIDEO_FIELDS and value not in (None, "", []):
            raise RecordError(f"its field {shown(name)!r} refers to the member .{shown(video)}, which is not read")
        for file in value if isinstance(value, list) else [value]:
            if isinstance(file, str) and (extension := _extension_of(file, key)) in unread:
                raise RecordError(
                    f"its field {shown(name)!r} refers to the member .{shown(extension)}, which is not read. Remove it "
                    "or set data.fields to what is read"
                )


def _require_listed_files(
    record: Mapping[str, Any], key: Key, kind: str, names: Sequence[str], others: OtherMembers, count: int
) -> None:
    """Compare a list of files, as in LLaVA records, with the members of a kind."""
    for name in names:
        files = record.get(name)
        if isinstance(files, str) and files and "conversations" in record:
            files = [files]
        if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
            continue
        if len(files) != count:
            raise RecordError(
                f"its field {name!r} names {plural(len(files), 'file')}, but the sample has "
                f"{plural(count, f'{kind} member')}"
            )
        extensions, members = [_extension_of(file, key) for file in files], [*others.names.get(kind, ())]
        if extensions != members and sorted(extensions) == sorted(members):
            raise RecordError(
                f"its field {name!r} names the files in another order ({', '.join(map(shown, extensions))}) than the "
                f"members have ({', '.join(map(shown, members))})"
            )


def _extension_of(file: str, key: Key) -> str:
    """Return the extension of a file name without its folders and key."""
    name = file.rpartition("/")[2]
    return name.removeprefix(str(key).rpartition("/")[2] + ".").lower()


def text_of_file(text: str) -> str:
    """Return the content of a text file without its final line break."""
    return text.removesuffix("\n").removesuffix("\r")


def failed_download(record: Any) -> bool:
    """True if img2dataset or video2dataset recorded a failed download of the media."""
    return isinstance(record, dict) and str(record.get("status")).startswith("failed_to_")


def require_download(record: Any, media: Mapping[str, int]) -> None:
    """Raise NotDownloaded for a record without media whose download failed."""
    if not any(media.values()) and failed_download(record):
        raise NotDownloaded(f"status is {shown(record['status'])} and the sample has no media")


def require_characters(conversation: Conversation) -> None:
    """Raise RecordError for half of a surrogate pair: JSON can spell it, tokenizers reject it."""
    texts = [part.text for turn in conversation.turns for part in turn.parts]
    others = [turn.fields for turn in conversation.turns if turn.fields] + [*conversation.tools]
    try:
        for text in [*texts, *(json.dumps(other, ensure_ascii=False) for other in others)]:
            text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise RecordError(f"{code} in its text is half of a surrogate pair, not a character") from error


def split_loss(fields: Mapping[str, Any], role: str) -> tuple[Mapping[str, Any], bool]:
    """Return the other fields of a message, and False if it is excluded from the loss.

    Raises:
        RecordError: a value is not true, false, 0 or 1; fields contradict each other; or a message that is not the
            assistant's is included. The message continues the name of the turn.
    """
    if partial := next((name for name in _PARTIAL_LOSS if name in fields), None):
        raise RecordError(f": {partial} is not supported. A message is learned as a whole or not at all: set weight=0")
    values = {name: fields[name] for name in _LOSS_VALUES if name in fields}
    if not values:
        return fields, True
    for name, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RecordError(f": {name} is {repr(value)[:80]}, expected true, false, 0 or 1")
    included = {bool(value) == _LOSS_VALUES[name] for name, value in values.items()}
    if len(included) > 1:
        raise RecordError(f": {' and '.join(values)} contradict each other. Keep one of them")
    if True in included and role != "assistant":
        name = next(iter(values))
        raise RecordError(f": {name} includes a {role} message in the loss. Only assistant messages are learned")
    return {name: value for name, value in fields.items() if name not in values}, True in included
