"""Values of columns and of typed parts that hold media: names of files, bytes, base64, arrays of audio."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from data.build.media import Medium, extent_of, medium_of_file
from data.errors import RecordError
from data.media.heif_headers import is_heic
from data.records.members import READABLE
from data.records.records import PART_KINDS
from data.text_format import shown

FILE_NAME = "file_name"  # the column of Hugging Face's folders of images or audio
_SUFFIXES = ("_path", "_paths", "_file", "_files", "_url", "_urls")
_FIRST = {kind: (kind, f"{kind}s") for kind in READABLE}
_OTHERS = {kind: tuple(kind + suffix for suffix in _SUFFIXES) for kind in READABLE}
_OTHERS["image"] += ("img", *(f"img{suffix}" for suffix in _SUFFIXES))
_INSIDE = ("bytes", "path", "url", "data", "base64")
"""Names under which objects and typed parts have a medium."""
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_FILE = re.compile(r"[^\t\r\n<>|]{1,255}\.([A-Za-z0-9]{2,5})")
_BASE64 = re.compile(r"[A-Za-z0-9+/=\r\n]+")
_HEAD = 64  # characters of base64 that are enough to recognise the kind of a file
_FORMS = "the name of a file, its bytes, base64, or for audio {array, sampling_rate}"
_ARRAY = {"array", "sampling_rate"}
_PIXELS = ("pixels", "pixel_values")
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_MAGIC = (
    (b"\xff\xd8", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"\0\0\0\x0cjP  ", "jp2"),
    (b"\x1aE\xdf\xa3", "webm"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\xff\xfb", "mp3"),
    (b"\xff\xf3", "mp3"),
    (b"\xff\xf2", "mp3"),
    (b"FORM", "aiff"),
    (b".snd", "au"),
    (b"caff", "caf"),
)


@lru_cache(maxsize=256)  # most records of a file have the same names
def media_columns(names: tuple[str, ...], kind: str) -> list[str]:
    """Return the columns whose name says that they hold media of a kind, such as `images` or `Image_Path`."""
    by_name = {name.lower(): name for name in names}
    first = [by_name[name] for name in _FIRST[kind] if name in by_name]
    return first or [by_name[name] for name in _OTHERS[kind] if name in by_name][:1]


def kind_of_file_name(record: Mapping[str, Any]) -> str:
    """Return the kind of the file that `file_name` names, as in Hugging Face's folders; empty if it names no media."""
    name = record.get(FILE_NAME)
    extension = Path(name).suffix[1:].lower() if isinstance(name, str) else ""
    return next((kind for kind, known in READABLE.items() if extension in known), "")


def media_in(kind: str, column: str, value: Any, folder: str, where: str) -> list[Medium]:
    """Return the media in the value of a column: one, or a list of them.

    Args:
        folder: of the files that are named.

    Raises:
        RecordError: it is none of the known forms, or a file cannot be used.
    """
    several = isinstance(value, list)
    media = []
    for one in value if several else [value]:
        if not _is_empty(one):
            media.append(_medium(kind, column, one, folder, where))
        elif several:
            raise RecordError(f"{where}: an empty {kind} among those of {column!r}")
    return media


def take_typed_parts(
    record: dict[str, Any], turns: str, folder: str, where: str
) -> tuple[dict[str, Any], list[Medium]]:
    """Take the media out of the typed parts of messages: (the record with their names in place of them, the media).

    Args:
        turns: the column of the messages.
        folder: of the files that parts name.

    Raises:
        RecordError: the medium of a part cannot be used.
    """
    media: list[Medium] = []

    def taken(part: Any) -> Any:
        kind = PART_KINDS.get(part["type"]) if isinstance(part, dict) and isinstance(part.get("type"), str) else None
        if kind is None:
            return part
        keys = [key for key in dict.fromkeys((part["type"], kind, *_INSIDE)) if not _is_empty(part.get(key))]
        if not keys:
            return part
        media.append(_medium(kind, keys[0], part[keys[0]], folder, where))
        return {"type": kind, kind: media[-1].name}

    messages = record.get(turns)
    if isinstance(messages, list):
        messages = [
            message | {"content": [taken(part) for part in message["content"]]}
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
    return (record | {turns: messages} if media else record), media


def require_no_media(
    record: Mapping[str, Any], names: Mapping[str, str], where: str, folder: str | None = None
) -> None:
    """Look for media in a record of which none was read.

    Args:
        names: `Columns.names`.
        folder: of the files that records name. Next to a text or messages, a name counts if the file is there.

    Raises:
        RecordError: a column holds media in a form that is not read, or the address of one.
    """
    is_text = not {"conversations", "messages", "text"}.isdisjoint([*record, *names])
    for column, value in record.items():
        if column in names.values() or column in ("caption", "text"):
            continue
        if column.lower() in _PIXELS or _depth(value) >= 3:
            raise RecordError(f"{where}: {column!r} seems to hold media as numbers. Expected {_FORMS}")
        if isinstance(value, Mapping) and value.keys() >= _ARRAY:
            raise RecordError(f"{where}: {column!r} holds audio that is not read. Give --columns audio={column}")
        if not isinstance(value, str):
            continue
        if _URL.match(value) and not is_text and (column.lower() == "url" or _kind_of_file(value)):
            raise _not_downloaded(column, value, where)
        kind = _kind_of_content(value)
        if not kind and not _URL.match(value) and (named := _kind_of_file(value)):
            kind = named if not is_text or (folder is not None and os.path.isfile(os.path.join(folder, value))) else ""
        if kind:
            raise RecordError(
                f"{where}: {column!r} seems to hold an {kind} that is not read ({shown(value[:80])}). Give --columns "
                f"{kind}={column}"
            )


def extension_of(content: bytes) -> str:
    """Return the extension of a file by its first bytes; empty if it is of no known kind."""
    if content[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(content[8:12], "")
    if content[4:8] == b"ftyp":
        return "avif" if content[8:12] in (b"avif", b"avis") else "heic" if is_heic(content[:256]) else "mp4"
    return next((extension for magic, extension in _MAGIC if content.startswith(magic)), "")


def _medium(kind: str, column: str, value: Any, folder: str, where: str) -> Medium:
    if isinstance(value, Mapping) and value.keys() >= _ARRAY and value["array"] is not None:
        return _of_array(value, column, where)
    name = ""
    if isinstance(value, Mapping):
        name = value["path"] if isinstance(value.get("path"), str) else ""
        value = next((value[key] for key in _INSIDE if not _is_empty(value.get(key))), None)
    if isinstance(value, str):
        content = _from_base64(value)
        if content is None and _URL.match(value) and not value.startswith("file://"):
            raise _not_downloaded(column, value, where)
        if content is None:
            return medium_of_file(kind, folder, unquote(value[7:]) if value.startswith("file://") else value, where)
        value = content
    if not isinstance(value, bytes):
        raise RecordError(f"{where}: {column!r} is of type {type(value).__name__}. Expected {_FORMS}")
    extension = name.rpartition(".")[2].lower() if "." in name else ""
    if extension not in READABLE[kind]:
        extension = extension_of(value)
    if extension not in READABLE[kind]:
        raise RecordError(f"{where}: {column!r} is no {kind} that can be decoded")
    return Medium(kind, extension, value, name.rpartition("/")[2] or column, extent_of(kind, value))


def _of_array(value: Mapping[str, Any], column: str, where: str) -> Medium:
    """Decoded audio, float32 [samples], as a WAV file of the same numbers."""
    import numpy as np
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
    return Medium("audio", "wav", file.getvalue(), column, (len(wave), rate))


def _from_base64(value: str) -> bytes | None:
    """The bytes that a text has as a data URI or as base64 of a known kind of file; None: it is neither."""
    if value.startswith("data:"):
        value = value.partition(",")[2]
    elif not _kind_of_content(value):
        return None
    try:
        return base64.b64decode(value + "==")
    except (binascii.Error, ValueError):
        return b""


def _kind_of_content(value: str) -> str:
    """The kind of the medium that a text has as a data URI or as base64; empty: it is no such text."""
    if value.startswith("data:"):
        kind = value[5:].partition("/")[0]
        return kind if kind in READABLE else ""
    head = value[:_HEAD]
    if len(head) < _HEAD or not _BASE64.fullmatch(head):
        return ""
    try:
        extension = extension_of(base64.b64decode("".join(head.split())[:48]))
    except (binascii.Error, ValueError):
        return ""
    return next((kind for kind, known in READABLE.items() if extension in known), "")


def _kind_of_file(value: str) -> str:
    """The kind of the medium that a text names, by its extension; empty: none."""
    found = _FILE.fullmatch(value.partition("?")[0])
    return next((kind for kind, known in READABLE.items() if found and found[1].lower() in known), "")


def _depth(value: Any) -> int:
    """How deep lists of numbers are inside each other; 0 for anything else."""
    depth = 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1
    return depth if isinstance(value, int | float) else 0


def _is_empty(value: Any) -> bool:
    return value in _EMPTY or (isinstance(value, dict) and all(_is_empty(one) for one in value.values()))


def _not_downloaded(column: str, url: str, where: str) -> RecordError:
    return RecordError(
        f"{where}: {column!r} is an address ({shown(url[:80])}), and a build downloads nothing. Download the files "
        "first, for example with img2dataset, and build shards of its output"
    )
