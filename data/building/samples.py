"""A row of any source -> the members of a sample, by rules that are the same for all sources; what cannot be trained on
is seen here."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.beside import ALONE, Beside
from data.bounds import BOUNDS
from data.building.columns import Columns
from data.errors import NothingToLearn, RecordError
from data.frames import Picture
from data.media.audio_headers import parse_audio_header
from data.media.headers import parse_header
from data.media.video_headers import parse_video_header
from data.members import READABLE
from data.records import parse_record
from data.shown import shown
from data.storage.whole_read import pread_all
from data.storage.write import LONGEST_NAME

_JSON = json.JSONEncoder(ensure_ascii=False)
_NUMBER = 12  # bytes of a key


class Place(NamedTuple):
    """Bytes of a file that stays where it is while shards are built."""

    path: str
    offset: int | None
    """None: the whole file."""
    size: int


@dataclass(frozen=True)
class Medium:
    """A picture, video or clip of a row."""

    kind: str
    extension: str
    content: bytes | Place
    name: str
    """For messages."""


@dataclass(frozen=True)
class Sample:
    """What becomes one sample of a shard."""

    members: Sequence[tuple[str, bytes | Place]]
    """(extension, content)."""
    name: str = ""
    """What its source calls it; it need not be unique."""
    rules: tuple[str, ...] = ()
    """Which rules changed its record, as sentences about several."""


class Source(Protocol):
    """What shards are built of."""

    @property
    def what(self) -> str:
        """It, for messages."""

    @property
    def parts(self) -> Sequence[Path]:
        """Files or folders that are read one by one, in the order of their samples."""

    def rows(self, part: Path) -> Iterator[tuple[str, Callable[[], Sample | None]]]:
        """(where it is, what makes it a sample) of every row. The second raises RecordError, NothingToLearn; None of it
        is a row that is no sample.

        Raises:
            DataError: the part cannot be read.
        """

    def notes(self) -> Sequence[str]:
        """What else its user should know."""


def sample_of(
    record: Any,
    media: Sequence[Medium],
    columns: Columns,
    where: str,
    *,
    name: str = "",
    alone: bool = True,
) -> Sample:
    """A record and its media as a sample.

    Args:
        alone: whether a caption without any medium is a plain text.

    Raises:
        RecordError, NothingToLearn: it cannot be trained on; the message begins with `where`.
    """
    if not isinstance(record, dict):
        raise RecordError(f"{where} is a JSON {type(record).__name__}, not an object")
    for medium in media:
        require_header(medium.kind, medium.content, f"{where}: {shown(medium.name)}")
    counts = {kind: sum(medium.kind == kind for medium in media) for kind in READABLE}
    record, rules = columns.applied(record, counts, where)
    if not media and not alone and not any(name in record for name in ("conversations", "messages")):
        raise RecordError(f"{where}: a caption without its medium, whose name or bytes are empty")
    raw = encoded(record, where)
    several = len(media) > 1
    names = [f"{at}.{medium.extension}" if several else medium.extension for at, medium in enumerate(media)]
    pictures = pictures_among([(name, medium.kind) for name, medium in zip(names, media, strict=True)])
    checked(raw, "json", where, counts, pictures=pictures)
    members: list[tuple[str, bytes | Place]] = [
        (name, medium.content) for name, medium in zip(names, media, strict=True)
    ]
    return Sample([*members, ("json", raw)], name, rules)


def encoded(record: Any, where: str) -> bytes:
    """A record as JSON."""
    try:
        return _JSON.encode(record).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{where}: half of a surrogate pair in its text, which is no character") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: {error}") from error


def pictures_among(members: Iterable[tuple[str, str]]) -> list[Picture]:
    """The pictures and videos of a sample, of (extension, kind) of its members. How many pictures of a video are read
    is for a run to say."""
    return [Picture(extension, int(kind == "video")) for extension, kind in members if kind in ("image", "video")]


def checked(
    raw: bytes,
    extension: str,
    where: str,
    counts: Mapping[str, int],
    beside: Beside = ALONE,
    pictures: Sequence[Picture] = (),
) -> None:
    """Raises RecordError, NothingToLearn (blank ones too) for a record that cannot be trained on."""
    try:
        conversation = parse_record(raw, extension, where, counts, beside=beside, pictures=pictures)
    except RecordError as error:
        raise type(error)(str(error).replace(f"key {where!r}", where)) from error
    if conversation.is_blank:
        raise NothingToLearn(f"{where}: its caption or answer is blank")


def medium_of_file(kind: str, folder: str, name: str, where: str) -> Medium:
    """A file that a record names, below a folder. Raises RecordError: it is not there, or of a kind that is not
    decoded."""
    extension = name.rpartition(".")[2].lower()
    if extension not in READABLE[kind]:
        known = ", ".join(sorted(READABLE[kind]))
        raise RecordError(f"{where}: {shown(name)} is no {kind} that can be decoded ({known})")
    path = os.path.join(folder, name)
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        said = f"no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error}"
        raise RecordError(f"{where}: {shown(said)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise RecordError(f"{where}: no file {shown(path)}")
    return Medium(kind, extension, Place(path, None, found.st_size), name)


def require_name(extension: str, where: str) -> None:
    """Raises RecordError for an extension that no header has room for."""
    length = len(extension.encode("utf-8", "surrogateescape"))
    if length > LONGEST_NAME - _NUMBER:
        raise RecordError(f"{where}: a member with an extension of {length} bytes")


def require_extent(kind: str, extent: tuple[int, int] | None, what: str) -> None:
    """Raises RecordError for a medium without a readable header, or above its bounds. `what` begins the message.

    Args:
        extent: see `data.media.headers.parse_extent`; zeros are none.
    """
    if extent is None or 0 in extent:
        raise RecordError(f"{what} has no readable {kind} header" + ("" if kind == "image" else ", or is cut off"))
    if above := (BOUNDS.of_clip if kind == "audio" else BOUNDS.of_picture)(*extent):
        raise RecordError(f"{what}: {above}")


def require_header(kind: str, content: bytes | Place, what: str) -> None:
    """`require_extent` of a medium's own header."""
    if isinstance(content, bytes):
        found = _extent(kind, lambda at, length: content[at : at + length], len(content))
    else:
        path, offset, size = content
        fd, start = os.open(path, os.O_RDONLY | os.O_CLOEXEC), offset or 0
        try:
            found = _extent(kind, lambda at, length: pread_all(fd, max(min(length, size - at), 0), start + at), size)
        finally:
            os.close(fd)
    require_extent(kind, found, what)


def _extent(kind: str, read: Callable[[int, int], bytes], size: int) -> tuple[int, int] | None:
    if kind == "audio":
        return parse_audio_header(read(0, size))
    header = parse_video_header(read, size) if kind == "video" else parse_header(read, size)
    return None if header is None else (header.height, header.width)
