"""Turn a dataset row and its media into a sample that training accepts, or an error that names the row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from data.errors import DataError, NotDownloaded, NothingToLearn, RecordError
from data.media.options import BOUNDS, Bounds
from data.records.conversation import MARKERS, Visual
from data.records.markers import special_marker, with_our_markers
from data.records.members import ABSENT, LEARNED, MEDIA, PREFERENCES, READABLE, TEXTS, Fields
from data.records.preferences import Preference, parse_any
from data.records.record_checks import LOSS_FIELDS, failed_download
from data.records.records import form_of
from data.rows.media_values import (
    FileRange,
    MediaItem,
    encode_record,
    require_no_media,
    with_typed_media,
)
from data.rows.segments import CUT, SEGMENT, cut_items
from data.text_format import Key, shown

_FORMS = ("conversations", "messages", "caption", "text")
"""Texts of records; the first that a record has counts."""
_TURNS = (("conversations", "from", "value"), ("messages", "role", "content"))
_ANSWERS = ("answer", "caption", "text", "label")
MARKED = "without any marker: media before the first question"
PAIRED = "with `texts`, pairs of `user` and `assistant`: became `conversations`"
KEYFRAMES = "with captions of keyframes: learned is the one of the whole video, idx -1"
_FIELD = re.compile(r"\{([^{}]+)\}")


class Sample(NamedTuple):
    """A sample of a shard."""

    members: Sequence[tuple[str, bytes | FileRange]]
    """(extension, content)."""
    kinds: Sequence[str]
    notes: tuple[str, ...] = ()
    """Changes of its record, worded to follow a number of records."""


@dataclass(frozen=True)
class Columns:
    """`--columns`, `--question` and `--quoted`.

    Attributes:
        names: part of a record (of `data.records.members.TEXTS` or `MEDIA`) -> column.
        question: asked about every sample with a caption; empty: none.
        quoted: True if quotes enclose cells of a TSV file, as in CSV files.
        whole_files: True to ignore segments of recordings.
        templates: kind of media -> file name with columns in braces, such as `{page_dir}/{videoid}.mp4`.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    question: str = ""
    quoted: bool = False
    whole_files: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.names:
            if part not in (parts := (*TEXTS, *MEDIA, *SEGMENT)):
                raise DataError(f"--columns {part}=...: is no part of a record: they are {', '.join(parts)}")
            if part in SEGMENT and self.whole_files:
                raise DataError(f"--columns {part}=... and --whole-files are both given: leave out one of them")
        for part in self.templates.keys() - MEDIA:
            raise DataError(f"--columns {part}={self.templates[part]}: only {', '.join(MEDIA)} join columns in braces")
        if self.question and "question" in self.names:
            raise DataError("--question and --columns question=... are both given: leave out one of them")

    @classmethod
    def parse(
        cls, entries: Sequence[str], question: str = "", quoted: bool = False, whole_files: bool = False
    ) -> Columns:
        """Parse `WHAT=COLUMN` entries. Raises DataError."""
        names: dict[str, str] = {}
        for entry in entries:
            what, equals, column = entry.partition("=")
            if not equals or not column or what in names:
                raise DataError(f"--columns {entry}: must be WHAT=COLUMN, such as caption=sentence, and each WHAT once")
            names[what] = column
        templates = {what: column for what, column in names.items() if _FIELD.search(column)}
        return cls(names | {what: what for what in templates}, question, quoted, whole_files, templates)

    def with_file_names(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the row with the file names of `templates`. Raises RecordError for an absent or empty column."""

        def value(match: re.Match[str]) -> str:
            if (part := _value(row, match[1], where)) is None:
                raise RecordError(f"{where}: {match[1]!r} is empty, and a file name needs it ({match.string})")
            return str(part)

        return row | {kind: _FIELD.sub(value, template) for kind, template in self.templates.items()}

    @cached_property
    def changes_records(self) -> bool:
        """True if the texts of records change."""
        return bool(self.question) or any(name in TEXTS for name in self.names)

    def require(self, columns: Sequence[str], where: str) -> None:
        """Raise DataError for a column that the table lacks."""
        for part, column in self.names.items():
            template = self.templates.get(part, "")
            if any(name not in columns for name in _FIELD.findall(template) or [column]):
                shown_columns = ", ".join(map(str, columns))
                raise DataError(f"--columns {part}={template or column}: {where} has the columns {shown_columns}")


def make_sample(
    record: Any,
    items: Sequence[MediaItem],
    columns: Columns,
    where: str,
    *,
    folder: str | None = None,
    text_only: bool = True,
) -> Sample:
    """Return a record and its media as a sample.

    Args:
        folder: folder of the files in typed parts of messages; None: media of such parts are not taken.
        text_only: True if a caption without media is plain text; False if its media are missing.

    Raises:
        RecordError, NothingToLearn: it cannot be trained on; the message starts with `where`.
    """
    if not isinstance(record, dict):
        raise RecordError(f"{where} is a JSON {type(record).__name__}, not an object")
    is_cut = False
    if folder is not None:
        record, items = with_typed_media(record, items, columns.names.get("messages", "messages"), folder, where)
        if not columns.whole_files:
            files, items = items, cut_items(record, items, columns.names, where)
            is_cut = any(before is not after for before, after in zip(files, items, strict=True))
    for item in items:
        item.require_extent(where)
    counts = {kind: sum(item.kind == kind for item in items) for kind in READABLE}
    texts = {part: _value(record, column, where) for part, column in columns.names.items() if part in TEXTS}
    original = record
    raw, notes = _encoded(record, texts, columns.question, counts, where, text_only)
    extensions = [f"{at}.{item.extension}" if len(items) > 1 else item.extension for at, item in enumerate(items)]
    visuals = [
        Visual(extension, int(item.kind == "video"))
        for extension, item in zip(extensions, items, strict=True)
        if item.kind != "audio"
    ]
    require_learnable(partial(parse_any, raw, "json", where, counts, visuals=visuals), where)
    if not items:
        require_no_media(original, columns.names, where, folder)
    contents = [item.content for item in items]
    members = [*zip(extensions, contents, strict=True), ("json", raw)]
    return Sample(members, [item.kind for item in items], (*notes, CUT) if is_cut else notes)


def parse_row[Parsed](
    record: dict[str, Any],
    text_only: bool,
    fields: Fields,
    key: Key,
    counts: Mapping[str, int],
    media: Mapping[str, int],
    bounds: Bounds = BOUNDS,
    visuals: Sequence[Visual] = (),
    *,
    parse: Callable[..., Parsed],
) -> Parsed:
    """Parse a row of a table, as if it had been built into a shard.

    Args:
        record: columns without media; see `RowReader.record` for `text_only`.
        fields: `data.fields`, whose texts are values of the record: `json[COLUMN]`.
        counts: kind -> all media of the row.
        parse: parses its JSON, as `parse_record` or `parse_preference`.

    See `parse_record` for the other arguments and the errors.
    """
    where = f"key {key!r}"
    texts = {name: value for name, source in fields.texts if (value := source.value(record)) is not ABSENT}
    if fields.texts:
        fields.require(texts, {"json": sorted(record)[:8]})
        learned = [name for name in LEARNED if name in texts]
        if all(texts[name] is None for name in learned):
            raise NothingToLearn(f"{where}: {fields.key}: {' and '.join(learned)} is null")
        texts = {name: value for name, value in texts.items() if value is not None}
    raw, _ = _encoded(record, texts, "", counts, where, text_only)
    return parse(raw, "json", key, media, bounds, visuals=visuals)


def _encoded(
    record: dict[str, Any],
    texts: Mapping[str, Any],
    question: str,
    counts: Mapping[str, int],
    where: str,
    text_only: bool,
) -> tuple[bytes, tuple[str, ...]]:
    """Return the JSON of a record with its texts under their usual names, and notes. See `make_sample`."""
    needs_media = not any(counts.values()) and not text_only
    if needs_media and failed_download(record):
        raise NotDownloaded(f"{where}: {shown(str(record.get('error_message') or record['status']))}")
    if any(record.get(form) is not None for form in _FORMS):  # a table has all columns in every row
        record = {name: value for name, value in record.items() if value is not None or name not in _FORMS}
    record, notes = _with_texts(record, texts, question, counts, where)
    if needs_media and record.keys().isdisjoint(("conversations", "messages")) and form_of(record) == "turns":
        raise RecordError(f"{where}: a caption without its medium, whose name or bytes are empty")
    return encode_record(record, where), notes


def require_learnable(parse: Callable[[], Preference], where: str) -> None:
    """Raise RecordError or NothingToLearn for a record that cannot be trained on."""
    try:
        answers = parse().answers
    except RecordError as error:
        raise type(error)(str(error).replace(f"key {where!r}", where)) from error
    if any(answer.is_blank for answer in answers):
        raise NothingToLearn(f"{where}: its caption or answers are blank, or excluded from the loss")


def _with_texts(
    record: dict[str, Any], texts: Mapping[str, Any], question: str, counts: Mapping[str, int], where: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the record with its texts under their usual names, and notes.

    Args:
        texts: part of a record -> value, see `Columns.names`.
        question: see `Columns.question`.
        counts: kind -> media items.
    """
    notes: tuple[str, ...] = ()
    if form_of(texts) != "turns":
        record = {name: value for name, value in record.items() if name not in (*_FORMS, *PREFERENCES)} | {**texts}
    if form_of(record) != "turns":
        return record, notes  # its parser inserts the media
    if not texts and record.keys().isdisjoint((*_FORMS, "texts")) and _has_keyframes(record):
        texts, notes = {"caption": _caption_of_video(record["captions"], where)}, (KEYFRAMES,)
    if texts or question or "texts" in record:
        if not texts and record.keys().isdisjoint(_FORMS) and "texts" in record:
            texts, notes = {"conversations": record["texts"]}, (PAIRED,)
        conversation_field = next((part for part in ("conversations", "messages") if texts.get(part) is not None), None)
        answer = next((part for part in _ANSWERS if part in texts), None)
        if conversation_field is not None:
            record = _only_form({conversation_field: _turns(texts[conversation_field], where)}, record)
        elif answer is None and "question" in texts:
            raise RecordError(f"{where}: a question, and no column is its answer: give --columns answer=...")
        elif answer is not None or (question and record.keys().isdisjoint(("conversations", "messages"))):
            answer = answer or next((name for name in ("caption", "text") if name in record), None)
            if answer is not None:
                question = _text(texts.get("question"), "question", where) or question
                answer_text = _text(texts.get(answer, record.get(answer)), answer, where)
                record = _only_form(_answered(question, answer_text, counts, where), record)
        record = record | {part: texts[part] for part in ("system", "tools") if texts.get(part) is not None}
    marked = _mark_media(record, counts, where)
    return (marked, (*notes, MARKED)) if marked is not record else (record, notes)


def _only_form(form: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    return form | {name: value for name, value in record.items() if name not in _FORMS}


def _answered(question: str | None, answer: str | None, counts: Mapping[str, int], where: str) -> dict[str, Any]:
    """Return an answer as a caption, or with its question as a conversation."""
    if not question or answer is None:
        return {"caption": answer}
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    if not _is_marked(question) and not _has_foreign_markers(turns[:1], "from", "value", counts, where):
        turns[0]["value"] = _markers(counts) + question
    return {"conversations": turns}


def _has_keyframes(record: dict[str, Any]) -> bool:
    """True for the captions of ShareGPT4Video: objects with `idx` and `content`."""
    captions = record.get("captions")
    if not isinstance(captions, list) or not captions:
        return False
    return all(isinstance(caption, dict) and {"idx", "content"} <= caption.keys() for caption in captions)


def _caption_of_video(captions: list[dict[str, Any]], where: str) -> Any:
    """Return the caption of the whole video, whose `idx` is -1, next to those of keyframes. Raises RecordError."""
    whole = [caption["content"] for caption in captions if str(caption["idx"]) == "-1"]
    if len(whole) != 1:
        raise RecordError(f"{where}: expected one caption with idx -1, of the whole video, got {len(whole)}")
    return whole[0]


def _value(record: dict[str, Any], column: str, where: str) -> Any:
    if column not in record:
        raise RecordError(f"{where} has no {column!r}; it has {', '.join(sorted(map(str, record))[:8])}")
    return record[column]


def _text(value: Any, part: str, where: str) -> str | None:
    """Return a text, or None for null. Labels and answers may be integers."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise RecordError(f"{where}: {part} is of type {type(value).__name__}, not a text")


def _turns(value: Any, where: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{where}: its turns are a text that is not JSON ({error})") from error
    if not isinstance(value, list):
        raise RecordError(f"{where}: its turns are of type {type(value).__name__}, not a list")
    if not value or not all(isinstance(pair, dict) and {"user", "assistant"} <= pair.keys() for pair in value):
        return value
    turns = []
    for pair in value:
        loss = {name: pair[name] for name in LOSS_FIELDS if name in pair}
        turns += [{"from": "human", "value": pair["user"]}, {"from": "gpt", "value": pair["assistant"], **loss}]
    return turns


def _mark_media(record: dict[str, Any], counts: Mapping[str, int], where: str) -> dict[str, Any]:
    """Insert the media before the first question if no turn has markers."""
    if not any(counts.values()):
        return record
    for name, role, content in _TURNS:
        turns = record.get(name)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            continue
        if any(_is_marked(turn.get(content)) for turn in turns) or _has_foreign_markers(
            turns, role, content, counts, where
        ):
            return record
        at = next((at for at, turn in enumerate(turns) if turn.get(role) in ("human", "user")), None)
        question = None if at is None else turns[at].get(content)
        if at is None or not isinstance(question, str | list):
            return record
        if isinstance(question, str):
            question = _markers(counts) + question
        else:
            _require_no_special(question, where)
            question = [{"type": kind} for kind in MARKERS.values() for _ in range(counts.get(kind, 0))] + question
        return record | {name: [*turns[:at], turns[at] | {content: question}, *turns[at + 1 :]]}
    return record


def _markers(counts: Mapping[str, int]) -> str:
    return "".join(f"{marker}\n" * counts.get(kind, 0) for marker, kind in MARKERS.items())


def _is_marked(content: Any) -> bool:
    if isinstance(content, str):
        return any(marker in content for marker in MARKERS)
    return isinstance(content, list) and any(
        not isinstance(part, dict) or part.get("type") != "text" for part in content
    )


def _has_foreign_markers(turns: list[Any], role: str, content: str, counts: Mapping[str, int], where: str) -> bool:
    """True if markers of other model families stand for media. Raises RecordError as `with_our_markers` does."""
    try:
        return with_our_markers(turns, role, content, counts) != turns
    except RecordError as error:
        raise RecordError(f"{where}: its text{error}") from None


def _require_no_special(parts: list[Any], where: str) -> None:
    """Raise RecordError for a typed text with a marker, which would stay text."""
    for text in (part.get("text") for part in parts):
        if isinstance(text, str) and (marker := special_marker(text)):
            raise RecordError(f"{where}: a typed text has {marker}, and typed text is literal. Make it a typed part")
