"""Images, videos and audio in dataset rows: file names, bytes, base64, decoded audio, typed parts of messages."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from data.errors import DecodeError, RecordError
from data.media.headers import extension_of, parse_extent, parse_extent_bytes
from data.media.options import BOUNDS
from data.records.conversation import PART_KINDS
from data.records.members import PREFERENCES, READABLE, UNREADABLE, why_unreadable
from data.storage.files import pread_all
from data.text_format import shown

EMPTY: tuple[Any, ...] = (None, "", [], {})
FILE_NAME = "file_name"
"""Column with the file name of a row in Hugging Face's `imagefolder` and `audiofolder`."""
_SUFFIXES = ("_path", "_paths", "_filepath", "_file", "_files", "_url", "_urls")
_CONTENT_KEYS = ("bytes", "path", "url", "data", "base64")
_ARRAY = {"array", "sampling_rate"}
_FORMS = "the name of a file, its bytes, base64, or for audio {array, sampling_rate}"
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_FILE = re.compile(r"[^\t\r\n<>|]{1,255}\.([A-Za-z0-9]{2,5})")
_BASE64 = re.compile(r"[A-Za-z0-9+/=\r\n]+")
_HEAD = 64  # characters of base64 that show the type of a file


class FileRange(NamedTuple):
    """Bytes that stay in their file while shards are built."""

    path: str
    offset: int | None
    """None: the whole file."""
    size: int

    def read(self) -> bytes:
        """Return the bytes; fewer or more than `size` if the file has changed. Raises OSError."""
        with open(self.path, "rb") as file:
            return file.read() if self.offset is None else pread_all(file.fileno(), self.size, self.offset)


def size_of(content: bytes | FileRange) -> int:
    """Return the number of bytes."""
    return content.size if isinstance(content, FileRange) else len(content)


class MediaItem(NamedTuple):
    """An image, video or audio item of a row."""

    kind: str
    extension: str
    content: bytes | FileRange
    name: str
    """For messages."""
    known_extent: tuple[int, int] | None = None
    """Its extent, if it need not be read."""
    column: str = ""
    """The column, or the key in a typed part."""
    part: Mapping[str, Any] = MappingProxyType({})
    """The typed part or object with the item, which may select a segment."""

    def extent(self) -> tuple[int, int] | None:
        """Read the extent, see `data.media.headers.parse_extent`. Raises DecodeError or OSError."""
        content = self.content
        if self.known_extent is not None:
            return self.known_extent
        if isinstance(content, bytes):
            return parse_extent_bytes(self.kind, content)
        start, size = content.offset or 0, content.size
        with open(content.path, "rb", buffering=0) as file:
            return parse_extent(
                self.kind, lambda length, at: pread_all(file.fileno(), max(min(length, size - at), 0), start + at), size
            )

    def require_extent(self, where: str) -> None:
        """Raise RecordError if it has no readable header or exceeds the default bounds."""
        if self.extension.rpartition(".")[2] in UNREADABLE[self.kind]:
            raise RecordError(f"{where}: {shown(self.name)} {why_unreadable(self.extension, self.kind)}")
        try:
            extent = self.extent()
        except DecodeError as error:
            raise RecordError(f"{where}: {shown(self.name)}: {error}") from error
        if extent is None or 0 in extent:
            cut = "" if self.kind == "image" else ", or is cut off"
            raise RecordError(f"{where}: {shown(self.name)} has no readable {self.kind} header{cut}")
        if excess := BOUNDS.excess_of_extent(self.kind, *extent):
            raise RecordError(f"{where}: {shown(self.name)}: {excess}")


def item_of_file(kind: str, folder: str, name: str, where: str) -> MediaItem:
    """Return the media item of a file that a record names. Raises RecordError if it is unusable."""
    extension = name.rpartition(".")[2].lower()
    if extension not in READABLE[kind]:
        extensions = ", ".join(sorted(READABLE[kind]))
        raise RecordError(f"{where}: {shown(name)} is no {kind} that can be decoded ({extensions})")
    path = os.path.join(folder, name)
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = f"no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error}"
        raise RecordError(f"{where}: {shown(reason)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise RecordError(f"{where}: no file {shown(path)}")
    content = FileRange(path, None, status.st_size)
    return MediaItem(kind, extension, content, name)


@lru_cache(maxsize=256)  # most records of a file have the same names
def media_columns(names: tuple[str, ...], kind: str) -> Sequence[str]:
    """Return the columns with a name for media of a kind, such as `images` or `Image_Path`."""
    by_name = {name.lower(): name for name in names}
    plain = [by_name[name] for name in (kind, f"{kind}s") if name in by_name]
    stems = (kind, "img") if kind == "image" else (kind,)
    others = [stem + suffix for stem in stems for suffix in ("", *_SUFFIXES)]
    return plain or [by_name[name] for name in others if name in by_name][:1]


def kind_of_file_name(record: Mapping[str, Any]) -> str:
    """Return the media kind of the record's `file_name`, as in Hugging Face's folders; "" if none."""
    name = record.get(FILE_NAME)
    return kind_of_extension(Path(name).suffix[1:].lower()) if isinstance(name, str) else ""


def kind_of_extension(extension: str) -> str:
    """Return the media kind that is decoded from files with this extension; "" if none."""
    return next((kind for kind, extensions in READABLE.items() if extension in extensions), "")


def read_items(kind: str, column: str, value: Any, folder: str, where: str) -> list[MediaItem]:
    """Return the media items in a column's value: one, or a list. Raises RecordError if one is unusable."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and any(_is_empty(item) for item in value):
        raise RecordError(f"{where}: an empty {kind} among those of {column!r}")
    return [_item(kind, column, item, folder, where) for item in values if not _is_empty(item)]


def take_typed_parts(
    record: dict[str, Any], turns: str, folder: str, where: str
) -> tuple[dict[str, Any], list[MediaItem]]:
    """Return (record with names for the media in typed parts of `turns`, these media). May raise RecordError."""
    items: list[MediaItem] = []

    def taken(part: Any) -> Any:
        kind = PART_KINDS.get(part["type"]) if isinstance(part, dict) and isinstance(part.get("type"), str) else None
        if kind is None:
            return part
        keys = [key for key in dict.fromkeys((part["type"], kind, *_CONTENT_KEYS)) if not _is_empty(part.get(key))]
        if not keys:
            return part
        items.append(_item(kind, keys[0], part[keys[0]], folder, where)._replace(part=part))
        return {"type": kind, kind: items[-1].name}

    messages = record.get(turns)
    if isinstance(messages, list):
        messages = [
            message | {"content": [taken(part) for part in message["content"]]}
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
    return (record | {turns: messages} if items else record), items


def with_typed_media(
    record: dict[str, Any], items: Sequence[MediaItem], turns: str, folder: str, where: str
) -> tuple[dict[str, Any], Sequence[MediaItem]]:
    """Return the record and its media, those in typed parts of the messages `turns`, or else of the prompt of a
    preference, included. Raises RecordError if columns have other media."""
    turns = turns if isinstance(record.get(turns), list) else "prompt"
    record, typed = take_typed_parts(record, turns, folder, where)
    if items and typed and [item[:4] for item in items] != [item[:4] for item in typed]:
        raise RecordError(f"{where}: media in the typed parts of messages and others in columns. Remove one of them")
    return record, typed or items


def require_no_media(record: Mapping[str, Any], names: Mapping[str, str], where: str, folder: str | None) -> None:
    """Raise RecordError if a record without recognized media seems to hold some, or a URL of some.

    `names`: `Columns.names`. Next to a text or messages, a name counts only if its file exists in `folder`.
    """
    is_text = not {"conversations", "messages", "text", *PREFERENCES}.isdisjoint([*record, *names])
    for column, value in record.items():
        if column in names.values() or column in ("caption", "text"):
            continue
        if column.lower() in ("pixels", "pixel_values") or _depth(value) >= 3:
            raise RecordError(f"{where}: {column!r} seems to hold media as numbers. Expected {_FORMS}")
        if isinstance(value, Mapping) and value.keys() >= _ARRAY:
            raise RecordError(f"{where}: {column!r} holds audio that is not read. Give --columns audio={column}")
        if not isinstance(value, str):
            continue
        is_url = _URL.match(value) is not None
        if is_url and not is_text and (column.lower() == "url" or _kind_of_name(value)):
            raise _not_downloaded(column, value, where)
        kind = _kind_of_base64(value)
        if not kind and not is_url and (named := _kind_of_name(value)):
            kind = named if not is_text or (folder is not None and os.path.isfile(os.path.join(folder, value))) else ""
        if kind:
            raise RecordError(
                f"{where}: {column!r} seems to hold an {kind} that is not read ({shown(value[:80])}). Give --columns "
                f"{kind}={column}"
            )


def _item(kind: str, column: str, value: Any, folder: str, where: str) -> MediaItem:
    part = value if isinstance(value, Mapping) else {}
    return _item_of_value(kind, column, value, folder, where)._replace(column=column, part=part)


def _item_of_value(kind: str, column: str, value: Any, folder: str, where: str) -> MediaItem:
    if isinstance(value, Mapping) and value.keys() >= _ARRAY and value["array"] is not None:
        return _item_of_array(value, column, where)
    name = ""
    if isinstance(value, Mapping):
        name = value["path"] if isinstance(value.get("path"), str) else ""
        value = next((value[key] for key in _CONTENT_KEYS if not _is_empty(value.get(key))), None)
    if isinstance(value, str):
        content = _from_base64(value)
        if content is None and _URL.match(value) and not value.startswith("file://"):
            raise _not_downloaded(column, value, where)
        if content is None:
            return item_of_file(kind, folder, unquote(value[7:]) if value.startswith("file://") else value, where)
        value = content
    if not isinstance(value, bytes):
        raise RecordError(f"{where}: {column!r} is of type {type(value).__name__}. Expected {_FORMS}")
    extension = name.rpartition(".")[2].lower() if "." in name else ""
    if extension not in READABLE[kind]:
        extension = extension_of(value)
    if extension not in READABLE[kind]:
        raise RecordError(f"{where}: {column!r} is no {kind} that can be decoded")
    return MediaItem(kind, extension, value, name.rpartition("/")[2] or column)


def _item_of_array(value: Mapping[str, Any], column: str, where: str) -> MediaItem:
    """Return decoded audio, float32 [samples], as a lossless WAV file."""
    import soundfile

    try:
        wave, rate = np.asarray(value["array"], dtype=np.float32), int(value["sampling_rate"])
        if wave.ndim != 1 or not len(wave):
            raise RecordError(f"its shape is {list(wave.shape)}")
        file = io.BytesIO()
        soundfile.write(file, wave, rate, format="WAV", subtype="FLOAT")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(
            f"{where}: {column!r}: expected the samples of one channel and their rate ({error})"
        ) from error
    return MediaItem("audio", "wav", file.getvalue(), column, (len(wave), rate))


def _from_base64(value: str) -> bytes | None:
    """Return the bytes of a data URI, or of base64 of a known file type; None for other text."""
    if value.startswith("data:"):
        value = value.partition(",")[2]
    elif not _kind_of_base64(value):
        return None
    try:
        return base64.b64decode(value + "==")
    except (binascii.Error, ValueError):
        return b""


def _kind_of_base64(value: str) -> str:
    if value.startswith("data:"):
        kind = value[5:].partition("/")[0]
        return kind if kind in READABLE else ""
    head = value[:_HEAD]
    if len(head) < _HEAD or not _BASE64.fullmatch(head):
        return ""
    try:
        return kind_of_extension(extension_of(base64.b64decode("".join(head.split())[:48])))
    except (binascii.Error, ValueError):
        return ""


def _kind_of_name(value: str) -> str:
    match = _FILE.fullmatch(value.partition("?")[0])
    return kind_of_extension(match[1].lower()) if match else ""


def _depth(value: Any) -> int:
    """Return the depth of nested lists of numbers; 0 for anything else."""
    depth = 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1
    return depth if isinstance(value, int | float) else 0


def _is_empty(value: Any) -> bool:
    return value in EMPTY or (isinstance(value, dict) and all(_is_empty(item) for item in value.values()))


def _not_downloaded(column: str, url: str, where: str) -> RecordError:
    return RecordError(
        f"{where}: {column!r} is an address ({shown(url[:80])}), and nothing is downloaded. Download the files "
        "first, for example with img2dataset, and build shards of its output"
    )


def media_of_row(
    row: dict[str, Any], typed: Mapping[str, str], names: Mapping[str, str], folder: str, where: str
) -> tuple[dict[str, Any], list[MediaItem], bool]:
    """Return (the record, with file names in place of media; the media; True if no column is for media).

    Args:
        typed: column -> kind, by column type.
        names: `Columns.names`.
        folder: folder of the files that columns name.

    Raises:
        RecordError: a medium cannot be read, or several columns have media of one kind.
    """
    columns, text_only = _media_columns(row, typed, names, where)
    record, items = row, list[MediaItem]()
    for column, kind in columns.items():
        value = row[column]
        column_items = read_items(kind, column, value, folder, where)
        items += column_items
        if file_names := [item.name for item in column_items]:
            record = record | {column: file_names if isinstance(value, list) else file_names[0]}
        elif isinstance(value, dict):  # with empty fields
            record = {name: other for name, other in record.items() if name != column}
    return record, items, text_only


def columns_by_name(
    columns: Collection[str], typed: Mapping[str, str], names: Mapping[str, str], kind: str
) -> list[str]:
    """Return the columns that names tell to be of a media kind."""
    if kind in names:
        return [names[kind]]
    usual = media_columns(tuple(columns), kind)
    if kind in typed.values():  # image_url next to an image is its origin
        usual = [name for name in usual if name.lower() in (kind, f"{kind}s")]
    return [*usual]


def _media_columns(
    row: dict[str, Any], typed: Mapping[str, str], names: Mapping[str, str], where: str
) -> tuple[dict[str, str], bool]:
    """Return (column -> kind of a row's media, True if it has no media columns)."""
    columns = {column: kind for column, kind in typed.items() if kind not in names}
    text_only = not columns and FILE_NAME not in row
    for kind in READABLE:
        if kind in names and names[kind] not in row:
            raise RecordError(f"{where} has no {names[kind]!r}; it has {', '.join(sorted(row)[:8])}")
        usual = [name for name in columns_by_name(row, typed, names, kind) if name not in columns]
        text_only = text_only and not usual
        filled = [name for name in usual if row[name] not in EMPTY]
        if len(filled) > 1:
            raise RecordError(f"{where}: has both {' and '.join(filled)}")
        if not filled and not columns and kind not in names and kind_of_file_name(row) == kind:
            filled = [FILE_NAME]
        columns |= dict.fromkeys(filled, kind)
    return columns, text_only


def encode_record(record: Any, where: str) -> bytes:
    """Return a record as JSON. Raises RecordError."""
    try:
        return json.dumps(record, ensure_ascii=False, default=_text_of).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{where}: half of a surrogate pair in its text, which is no character") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: {error}") from error


def _text_of(value: Any) -> str:
    if isinstance(value, bytes):
        raise TypeError("bytes inside of a column, which a record has no place for")
    return str(value)
