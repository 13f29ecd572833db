"""A row of any source -> the members of a sample, by rules that are the same for all sources; what cannot be trained on
is seen here."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.beside import ALONE, Beside
from data.bounds import BOUNDS
from data.building.columns import Columns
from data.conversation import Conversation
from data.errors import NothingToLearn, RecordError
from data.frames import Picture
from data.media.audio_headers import parse_audio_header
from data.media.headers import parse_header
from data.media.video_headers import parse_video_header
from data.members import READABLE
from data.records import parse_made, parse_record
from data.shown import shown
from data.storage.whole_read import pread_all
from data.storage.write import LONGEST_NAME

_JSON = json.JSONEncoder(ensure_ascii=False)
_NUMBER = 12  # bytes of a key
_READ = os.O_RDONLY | os.O_CLOEXEC
_AT_ONCE = _READ | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO is not waited for


class Place(NamedTuple):
    """Bytes of a file that stays where it is while shards are built."""

    path: str
    offset: int | None
    """None: the whole file."""
    size: int


class Medium(NamedTuple):
    """A picture, video or clip of a row."""

    kind: str
    extension: str
    content: bytes | Place
    name: str
    """For messages."""
    extent: tuple[int, int] | None
    """What `extent_of` says of it."""


class Sample(NamedTuple):
    """What becomes one sample of a shard."""

    members: Sequence[tuple[str, bytes | Place]]
    """(extension, content)."""
    name: str = ""
    """What its source calls it; it need not be unique."""
    rules: tuple[str, ...] = ()
    """Which rules changed its record, as they follow a number of records."""


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
        if said := wrong_extent(medium.kind, medium.extent):
            raise RecordError(f"{where}: {shown(medium.name)}{said}")
    counts = counts_of([medium.kind for medium in media])
    record, rules = columns.applied(record, counts, where)
    if not media and not alone and "conversations" not in record and "messages" not in record:
        raise RecordError(f"{where}: a caption without its medium, whose name or bytes are empty")
    raw = encoded(record, where)
    several = len(media) > 1
    names = [f"{at}.{medium.extension}" if several else medium.extension for at, medium in enumerate(media)]
    members: list[tuple[str, bytes | Place]] = []
    pictures: list[Picture] = []
    for called, medium in zip(names, media, strict=True):
        members.append((called, medium.content))
        if medium.kind != "audio":
            pictures.append(picture_of(called, medium.kind))
    _require_learnable(partial(parse_made, record, raw, where, counts, pictures=pictures), where)
    members.append(("json", raw))
    return Sample(members, name, rules)


def encoded(record: Any, where: str) -> bytes:
    """A record as JSON."""
    try:
        return _JSON.encode(record).encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{where}: half of a surrogate pair in its text, which is no character") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: {error}") from error


def counts_of(kinds: Sequence[str]) -> dict[str, int]:
    """How many of each kind there are, by kind."""
    return {kind: kinds.count(kind) for kind in READABLE}


@lru_cache(maxsize=4096)
def picture_of(extension: str, kind: str) -> Picture:
    """A picture or video of a sample. How many pictures of a video are read is for a run to say."""
    return Picture(extension, int(kind == "video"))


def checked(
    raw: bytes,
    extension: str,
    where: str,
    counts: Mapping[str, int],
    beside: Beside = ALONE,
    pictures: Sequence[Picture] = (),
) -> None:
    """Raises RecordError, NothingToLearn (blank ones too) for a record that cannot be trained on."""
    read = partial(parse_record, raw, extension, where, counts, beside=beside, pictures=pictures)
    _require_learnable(read, where)


def _require_learnable(read: Callable[[], Conversation], where: str) -> None:
    try:
        conversation = read()
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
    fd = _opened(path, where)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _no_file(path, where)
        extent = _extent_in(kind, fd, 0, found.st_size)
    finally:
        os.close(fd)
    return Medium(kind, extension, Place(path, None, found.st_size), name, extent)


def _opened(path: str, where: str) -> int:
    """Raises RecordError: there is no such file. OSError: it cannot be read."""
    try:
        return os.open(path, _AT_ONCE)
    except (OSError, ValueError):
        return _opened_if_file(path, where)


def _opened_if_file(path: str, where: str) -> int:
    """`_opened` of what cannot be opened at once."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        said = f"no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error}"
        raise RecordError(f"{where}: {shown(said)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(path, where)
    return os.open(path, _READ)


def _no_file(path: str, where: str) -> RecordError:
    return RecordError(f"{where}: no file {shown(path)}")


def require_name(extension: str, where: str) -> None:
    """Raises RecordError for an extension that no header has a place for."""
    if "\0" in extension:
        raise RecordError(f"{where}: a member with a zero byte in its extension")
    length = len(extension.encode("utf-8", "surrogateescape"))
    if length > LONGEST_NAME - _NUMBER:
        raise RecordError(f"{where}: a member with an extension of {length} bytes")


def wrong_extent(kind: str, extent: tuple[int, int] | None) -> str:
    """What is wrong with a medium without a readable header, or above its bounds, as it goes on behind its name; empty
    if nothing is.

    Args:
        extent: see `data.media.headers.parse_extent`; zeros are none.
    """
    if extent is None or 0 in extent:
        return f" has no readable {kind} header" + ("" if kind == "image" else ", or is cut off")
    above = (BOUNDS.of_clip if kind == "audio" else BOUNDS.of_picture)(*extent)
    return f": {above}" if above else ""


def extent_of(kind: str, content: bytes | Place) -> tuple[int, int] | None:
    """What a medium's own header says of it, see `wrong_extent`. Raises OSError."""
    if isinstance(content, bytes):
        return _extent(kind, lambda at, length: content[at : at + length], len(content))
    fd = os.open(content.path, _READ)
    try:
        return _extent_in(kind, fd, content.offset or 0, content.size)
    finally:
        os.close(fd)


def _extent_in(kind: str, fd: int, start: int, size: int) -> tuple[int, int] | None:
    return _extent(kind, lambda at, length: pread_all(fd, max(min(length, size - at), 0), start + at), size)


def _extent(kind: str, read: Callable[[int, int], bytes], size: int) -> tuple[int, int] | None:
    if kind == "audio":
        return parse_audio_header(read(0, size))
    header = parse_video_header(read, size) if kind == "video" else parse_header(read, size)
    return None if header is None else (header.height, header.width)
