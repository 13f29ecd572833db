"""A row of any source -> the members of a sample, by rules that are the same for all sources; what cannot be trained on
is seen here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.records.record_checks import NO_OTHER_MEMBERS, OtherMembers
from data.build.columns import Columns
from data.build.media import Medium, Place, wrong_extent
from data.build.values import require_no_media, take_typed_parts
from data.records.conversation import Conversation
from data.errors import NothingToLearn, RecordError
from data.records.conversation import Visual
from data.records.members import READABLE
from data.records.records import parse_record
from data.text_format import shown
from data.storage.write import LONGEST_NAME

_NUMBER = 12  # bytes of a key


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
    folder: str | None = None,
) -> Sample:
    """A record and its media as a sample.

    Args:
        folder: of the files that typed parts of messages name; None: the media of such parts are not taken.
        alone: whether a caption without any medium is a plain text.

    Raises:
        RecordError, NothingToLearn: it cannot be trained on; the message begins with `where`.
    """
    if not isinstance(record, dict):
        raise RecordError(f"{where} is a JSON {type(record).__name__}, not an object")
    if folder is not None:
        record, of_parts = take_typed_parts(record, columns.names.get("messages", "messages"), folder, where)
        if media and of_parts and [one.name for one in media] != [one.name for one in of_parts]:
            raise RecordError(
                f"{where}: media in the typed parts of messages and others in columns. Remove one of them"
            )
        media = of_parts or media
    for medium in media:
        if said := wrong_extent(medium.kind, medium.extent):
            raise RecordError(f"{where}: {shown(medium.name)}{said}")
    counts = counts_of([medium.kind for medium in media])
    given = record
    record, rules = columns.applied(record, counts, where)
    if not media and not alone and "conversations" not in record and "messages" not in record:
        raise RecordError(f"{where}: a caption without its medium, whose name or bytes are empty")
    raw = encoded(record, where)
    several = len(media) > 1
    names = [f"{at}.{medium.extension}" if several else medium.extension for at, medium in enumerate(media)]
    members: list[tuple[str, bytes | Place]] = []
    pictures: list[Visual] = []
    for called, medium in zip(names, media, strict=True):
        members.append((called, medium.content))
        if medium.kind != "audio":
            pictures.append(picture_of(called, medium.kind))
    _require_learnable(partial(parse_record, raw, "json", where, counts, visuals=pictures), where)
    if not media:
        require_no_media(given, columns.names, where, folder)
    members.append(("json", raw))
    return Sample(members, name, rules)


def _text_of(value: Any) -> str:
    """A value that JSON has no form for: times and decimals as text."""
    if isinstance(value, bytes):
        raise TypeError("bytes inside of a column, which a record has no place for")
    return str(value)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_text_of)


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
def picture_of(extension: str, kind: str) -> Visual:
    """A picture or video of a sample. How many pictures of a video are read is for a run to say."""
    return Visual(extension, int(kind == "video"))


def checked(
    raw: bytes,
    extension: str,
    where: str,
    counts: Mapping[str, int],
    others: OtherMembers = NO_OTHER_MEMBERS,
    pictures: Sequence[Visual] = (),
) -> None:
    """Raises RecordError, NothingToLearn (blank or excluded ones too) for a record that cannot be trained on."""
    read = partial(parse_record, raw, extension, where, counts, others=others, visuals=pictures)
    _require_learnable(read, where)


def _require_learnable(read: Callable[[], Conversation], where: str) -> None:
    try:
        conversation = read()
    except RecordError as error:
        raise type(error)(str(error).replace(f"key {where!r}", where)) from error
    if conversation.is_blank:
        raise NothingToLearn(f"{where}: its caption or answers are blank, or excluded from the loss")


def require_name(extension: str, where: str) -> None:
    """Raises RecordError for an extension that no header has a place for."""
    if "\0" in extension:
        raise RecordError(f"{where}: a member with a zero byte in its extension")
    length = len(extension.encode("utf-8", "surrogateescape"))
    if length > LONGEST_NAME - _NUMBER:
        raise RecordError(f"{where}: a member with an extension of {length} bytes")
