"""What a record says of files, against the members that its sample has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.records.members import OTHER_VIDEO, VIDEO
from data.text_format import Key, plural, shown

_VIDEO_FIELDS = ("video", "videos")
_MEDIA_FIELDS = {"image": ("image", "images"), "video": _VIDEO_FIELDS, "audio": ("audio", "audios")}
_MARKER = re.compile(r"<\|?(?:image|audio|video|speech|sound)(?:[ _-]?\d+)?\|?>|<ImageHere>|<image_placeholder>")


@dataclass(frozen=True)
class Beside:
    """The members of a sample beside its record."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """kind -> extensions of the media that are read, in their order."""
    unread: Sequence[str] = ()
    """Extensions of those that are not read, and of which nobody said so."""


ALONE = Beside()


def stray_marker(text: str, taken: Mapping[str, str]) -> str | None:
    """The first marker of a medium in a text that is none of `taken`; None if there is none."""
    if "<" in text:
        for found in _MARKER.findall(text):
            if found not in taken:
                return found
    return None


def misfit(record: Mapping[str, Any], key: Key, beside: Beside, media: Mapping[str, int]) -> str | None:
    """What a record says of its files that is not so, or that nothing reads; None if there is nothing.

    Args:
        media: kind -> members that the run uses.
    """
    for kind, fields in _MEDIA_FIELDS.items():
        if kind == "video" and not media.get(kind):
            continue  # it may name the video whose pictures the sample has
        if record.keys().isdisjoint(fields):
            continue
        if kind in media and (wrong := _other_files(record, key, kind, fields, beside, media[kind])):
            return wrong
    if not beside.unread:
        return None
    unread = {name.lower() for name in beside.unread}
    has_video = next((name for name in beside.unread if name.rpartition(".")[2] in VIDEO | OTHER_VIDEO), None)
    for name, value in record.items():
        if has_video and name in _VIDEO_FIELDS and value not in (None, "", []):
            return f"its field {shown(name)!r} refers to the member .{shown(has_video)}, which is not read"
        for file in _texts(value):
            extension = _extension_of(file, key)
            if extension in unread:
                return (
                    f"its field {shown(name)!r} refers to the member .{shown(extension)}, which is not read: remove "
                    "it, or say by data.fields what is read"
                )
    return None


def _other_files(
    record: Mapping[str, Any], key: Key, kind: str, fields: Sequence[str], beside: Beside, count: int
) -> str | None:
    """Of a list of files, as LLaVA's records have it: another number or order than that of the members."""
    for name in fields:
        files = record.get(name)
        if isinstance(files, str) and files and "conversations" in record:
            files = [files]
        if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
            continue
        if len(files) != count:
            had = plural(count, f"{kind} member")
            return f"its field {name!r} names {plural(len(files), 'file')}, but the sample has {had}"
        if count == 1:
            continue  # in any order
        listed, members = [_extension_of(file, key) for file in files], [*beside.names.get(kind, ())]
        if listed != members and sorted(listed) == sorted(members):
            return (
                f"its field {name!r} names the files in another order ({', '.join(map(shown, listed))}) than the "
                f"members have ({', '.join(map(shown, members))})"
            )
    return None


def _texts(value: Any) -> Iterator[str]:
    values = value if isinstance(value, list) else [value]
    return (one for one in values if isinstance(one, str))


def _extension_of(file: str, key: Key) -> str:
    """The extension that a member of the sample has if it is this file: without folders, and without the key."""
    name = file.rpartition("/")[2]
    return name.removeprefix(str(key).rpartition("/")[2] + ".").lower()
