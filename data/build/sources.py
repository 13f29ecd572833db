"""Users' datasets, row by row: JSON, CSV, parquet, Arrow, tars, folders of files, speech corpora."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data.build.transcripts import kaldi_lines, transcript_lines
from data.errors import DataError, RecordError
from data.index.indexing import build_index
from data.records.conversation import Visual
from data.records.members import READABLE, arrange, unread
from data.records.preferences import parse_any
from data.records.record_checks import OtherMembers, text_of_file
from data.rows.media_values import (
    FileRange,
    MediaItem,
    media_of_row,
    require_no_media,
)
from data.rows.samples import Columns, Sample, make_sample, require_learnable
from data.rows.tables import Layout, batches, labelled, require_known_media
from data.text_format import plural, shown

JSON = (".json", ".jsonl", ".ndjson")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
ARROW = (".parquet", ".arrow")
QUOTED = 'with quotes around a cell and "" inside it, which stay: if quotes enclose cells, give --quoted'
_DOUBLED = re.compile(r'".*"".*"', re.DOTALL)
_STATS = "_stats.json"  # written by img2dataset next to each shard
_FILE_NAME = re.compile(r"([^.]+)[.](.+)")

Row = Callable[[], Sample]
"""Makes the sample of a row. Raises RecordError and NothingToLearn."""


@dataclass(frozen=True)
class Source:
    """The source of shards.

    Attributes:
        kind: `records` (a JSON, CSV or TSV file), `table` (parquet, Arrow), `tars`, `files` (folders), `transcripts`
            (of LibriSpeech), or `kaldi` (a data directory).
        parts: files or folders that are read one by one.
        folder: folder of the files that records name, or parent of the folders.
    """

    kind: str
    parts: Sequence[Path]
    folder: Path
    columns: Columns

    def __str__(self) -> str:
        if self.kind in ("files", "transcripts"):
            return str(self.folder)
        return str(self.parts[0] if self.kind in ("records", "kaldi") else self.parts[0].parent)

    def notes(self) -> list[str]:
        """Return sentences about dropped columns. Raises DataError if the only media are in them."""
        if self.kind != "table":
            return []
        layout = Layout.of(self.parts[0])
        dropped = [name for name in layout.dropped if name not in self.columns.names.values()]
        if dropped and not {*layout.media, *(self.columns.names.keys() & READABLE)}:
            remedy = "Give --columns image=COLUMN, or video or audio"
            require_known_media(next(batches(self.parts[0], dropped)).to_pylist(), str(self.parts[0]), remedy)
        reason = "bytes of no kind that is known; --columns image=NAME (video, audio) says what"
        return [f"the column {name!r} is left out: {reason}" for name in dropped]

    def rows(self, part: Path) -> Iterator[Row]:
        """Yield the rows of a part. Raises DataError if it cannot be read."""
        if self.kind == "tars":
            yield from self._tar_rows(part)
        elif self.kind == "files":
            yield from self._folder_rows(part)
        elif self.kind == "table":
            yield from self._table_rows(part)
        else:
            for where, record in self._records(part):
                yield partial(self._sample_of_row, record, {}, where)

    def _records(self, part: Path) -> Iterator[tuple[str, Any]]:
        """Return pairs of (where, record or RecordError)."""
        if self.kind == "transcripts":
            return transcript_lines(part, self.folder)
        if self.kind == "kaldi":
            return kaldi_lines(part)
        return _json_records(part) if part.suffix.lower() in JSON else self._cells(part)

    def _cells(self, file: Path) -> Iterator[tuple[str, Any]]:
        """Yield (line, record or RecordError) of a CSV or TSV file. Empty cells are null."""
        csv.field_size_limit(min(sys.maxsize, 1 << 24))
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self._quotes_are_text else csv.QUOTE_MINIMAL
        line = 1  # first line of the row: a quoted cell may have several
        try:
            with open(file, encoding="utf-8-sig", newline="") as lines:
                reader = csv.reader(lines, delimiter=SEPARATORS[file.suffix.lower()], quoting=quoting, strict=True)
                names = next(reader, None)
                if not names:
                    raise DataError(f"{file} is empty: its first line must name the columns")
                if len(set(names)) < len(names):
                    raise DataError(f"{file}: the column {max(names, key=names.count)!r} is there twice")
                self.columns.require(names, str(file))
                line = reader.line_num + 1
                for cells in reader:
                    if len(cells) == len(names):
                        yield f"line {line}", dict(zip(names, (cell or None for cell in cells), strict=True))
                    elif cells:
                        quotes = self._quotes_are_text and '"' in "".join(cells)
                        hint = ". If quotes enclose cells, give --quoted" if quotes else ""
                        counts = f"{plural(len(cells), 'column')}, and {len(names)} in line 1"
                        yield f"line {line}", RecordError(counts + hint)
                    line = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from error
        except csv.Error as error:
            raise DataError(f"{file}: the row that begins in line {line} cannot be read ({error})") from error

    @property
    def _quotes_are_text(self) -> bool:
        return self.parts[0].suffix.lower() == ".tsv" and not self.columns.quoted

    def _table_rows(self, part: Path) -> Iterator[Row]:
        layout, number = Layout.of(part), 0
        self.columns.require(layout.names, str(part))
        names = [name for name in layout.names if name not in layout.dropped or name in self.columns.names.values()]
        for batch in batches(part, names):
            for row in batch.to_pylist():
                record = {name: labelled(value, layout.labels.get(name)) for name, value in row.items()}
                yield partial(self._sample_of_row, record, layout.media, f"{part.name}: row {number}")
                number += 1

    def _sample_of_row(self, row: Any, typed: Mapping[str, str], where: str) -> Sample:
        """Return the sample of a record whose columns name or hold media. `typed`: column -> kind, by column type."""
        if isinstance(row, RecordError):
            raise RecordError(f"{where}: {row}")
        if not isinstance(row, dict):
            return make_sample(row, [], self.columns, where)
        row = self.columns.with_file_names(row, where)
        record, items, text_only = media_of_row(row, typed, self.columns.names, str(self.folder), where)
        sample = make_sample(record, items, self.columns, where, folder=str(self.folder), text_only=text_only)
        if self.kind == "records" and self._quotes_are_text:
            if any(_DOUBLED.fullmatch(cell) for cell in row.values() if cell):
                return sample._replace(notes=(*sample.notes, QUOTED))
        return sample

    def _tar_rows(self, tar: Path) -> Iterator[Row]:
        index = build_index(tar)
        for row in range(len(index)):
            members = [
                MediaItem(
                    member.kind,
                    member.extension,
                    FileRange(str(tar), member.offset, member.size),
                    f".{member.extension}",
                    member.extent,
                )
                for member in index.members(row)
            ]
            where = f"{tar.name}: {shown(index.key(row))}"
            yield partial(self._sample_of_members, where, members, index.record(row), index.bad_reason(row))

    def _folder_rows(self, folder: Path) -> Iterator[Row]:
        groups: dict[str, list[str]] = {}
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_file()):
            if (match := _FILE_NAME.fullmatch(name)) and not name.endswith(_STATS):
                groups.setdefault(match[1], []).append(match[2])
        for key, extensions in groups.items():
            where = str(folder.relative_to(self.folder) / key)
            yield partial(self._sample_of_files, where, [(name, folder / f"{key}.{name}") for name in extensions])

    def _sample_of_files(self, where: str, paths: Sequence[tuple[str, Path]]) -> Sample:
        files = {extension.lower(): path for extension, path in paths}
        if len(files) < len(paths):
            raise RecordError(f"{where}: files whose names differ in case only: {', '.join(p.name for _, p in paths)}")
        arranged = arrange(tuple(files))
        extensions, members = list(files), []
        for at, kind in zip(arranged.order, arranged.kinds, strict=True):
            extension = extensions[at]
            content = FileRange(str(files[extension]), None, files[extension].stat().st_size)
            members.append(MediaItem(kind, extension, content, f".{extension}"))
        return self._sample_of_members(where, members, arranged.record, arranged.reason)

    def _sample_of_members(
        self, where: str, members: Sequence[MediaItem], record_at: int | None, fault: str | None
    ) -> Sample:
        """Return the sample of a record, `members[record_at]`, and its media members, in order."""
        if fault is not None or record_at is None:
            raise RecordError(f"{where}: {fault}")
        contents = [member.content for member in members if isinstance(member.content, FileRange)]
        items = [member for member in members if member.kind in READABLE]
        names, text = [member.extension for member in members], members[record_at]
        raw, is_json = contents[record_at].read(), text.extension.rpartition(".")[2] == "json"
        written: list[bytes | FileRange] = [*contents]
        notes: tuple[str, ...] = ()
        if self.columns.changes_records:
            sample = make_sample(_parsed(raw, is_json, where), items, self.columns, where)
            names[record_at], written[record_at] = sample.members[-1]
            notes = sample.notes
        else:
            for item in items:
                item.require_extent(where)
            media = {kind: [item.extension for item in items if item.kind == kind] for kind in READABLE}
            counts = {kind: len(extensions) for kind, extensions in media.items()}
            others = OtherMembers(media, [name for name, _ in unread(names)])
            visuals = [Visual(item.extension, int(item.kind == "video")) for item in items if item.kind != "audio"]
            parse = partial(parse_any, raw, text.extension, where, counts, others=others, visuals=visuals)
            require_learnable(parse, where)
            if not items and is_json:
                require_no_media(_parsed(raw, is_json, where), {}, where, None)
        return Sample(list(zip(names, written, strict=True)), [item.kind for item in items], notes)


def _json_records(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with open(file, encoding="utf-8-sig") as lines:
            start = lines.read(4096).lstrip()[:1]
            lines.seek(0)
            if start == "[":
                yield from ((f"record {at}", record) for at, record in enumerate(json.load(lines)))
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        where = f"line {number}: " if number > 1 else ""
        raise DataError(f"{file} is neither a JSON list nor a JSON object a line ({where}{error})") from error


def _parsed(raw: bytes, is_json: bool, where: str) -> Any:
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text) if is_json else {"caption": text_of_file(text)}
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: its record is not {'JSON' if is_json else 'UTF-8'} ({error})") from error
