"""Files of records that name their media: a JSON list such as LLaVA's, a JSON object a line, CSV, TSV."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data.build.columns import Columns
from data.build.media import Medium
from data.build.samples import Sample, sample_of
from data.build.values import FILE_NAME, kind_of_file_name, media_columns, media_in
from data.errors import DataError, RecordError
from data.records.members import READABLE
from data.text_format import plural

TABLES = {".csv": ",", ".tsv": "\t"}
"""What separates columns, by a file's ending."""
JSON = (".json", ".jsonl", ".ndjson")
_LOOK = 4096  # characters in which a file begins
_DOUBLED = re.compile(r'".*"".*"', re.DOTALL)
QUOTED = 'with quotes around a cell and "" inside it, which stay: if quotes enclose cells, give --quoted'
_NONE: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class RecordsFile:
    """One file of records.

    Attributes:
        media: the folder that its files are in.
    """

    file: Path
    media: Path
    columns: Columns

    @property
    def what(self) -> str:
        """It, for messages."""
        return str(self.file)

    @property
    def parts(self) -> Sequence[Path]:
        """The file."""
        return [self.file]

    def notes(self) -> Sequence[str]:
        """Nothing."""
        return ()

    def rows(self, part: Path) -> Iterator[tuple[str, Callable[[], Sample | None]]]:
        """Every record."""
        read = self._table() if part.suffix.lower() in TABLES else _json(part)
        for where, record in read:
            yield where, partial(self._sample, record, where)

    @property
    def _quotes_are_text(self) -> bool:
        return self.file.suffix.lower() == ".tsv" and not self.columns.quoted

    def _table(self) -> Iterator[tuple[str, Any]]:
        csv.field_size_limit(min(sys.maxsize, 1 << 24))
        separator = TABLES[self.file.suffix.lower()]
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self._quotes_are_text else csv.QUOTE_MINIMAL
        line = 1  # where the row begins: a quoted cell may have several lines
        try:
            with open(self.file, encoding="utf-8-sig", newline="") as lines:
                reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
                names = next(reader, None)
                if not names:
                    raise DataError(f"{self.file} is empty: its first line must name the columns")
                if len(set(names)) < len(names):
                    raise DataError(f"{self.file}: the column {max(names, key=names.count)!r} is there twice")
                self.columns.require(names, str(self.file))
                line = reader.line_num + 1
                for cells in reader:
                    if len(cells) == len(names):
                        record = {name: cell if cell else None for name, cell in zip(names, cells, strict=True)}
                        yield f"line {line}", record
                    elif cells:
                        has_quote = self._quotes_are_text and '"' in "".join(cells)
                        hint = ". If quotes enclose cells, give --quoted" if has_quote else ""
                        columns = f"{plural(len(cells), 'column')}, and {len(names)} in line 1"
                        yield f"line {line}", RecordError(columns + hint)
                    line = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise DataError(f"{self.file} is not UTF-8 ({error.reason} at byte {error.start})") from error
        except csv.Error as error:
            raise DataError(f"{self.file}: the row that begins in line {line} cannot be read ({error})") from error

    def _sample(self, record: Any, where: str) -> Sample:
        if isinstance(record, RecordError):
            raise RecordError(f"{where}: {record}")
        if not isinstance(record, dict):
            return sample_of(record, [], self.columns, where)
        cells = [*record.values()]
        media: list[Medium] = []
        given, alone, fields = record, FILE_NAME not in record, tuple(record)
        for kind in READABLE:
            columns = self.columns.media(kind, media_columns(fields, kind))
            # A caption whose image has no name is no plain text.
            alone = alone and given.keys().isdisjoint(columns)
            if column := self._column(given, kind, columns, where):
                found = media_in(kind, column, given[column], str(self.media), where)
                if names := [medium.name for medium in found]:
                    record = record | {column: names if isinstance(given[column], list) else names[0]}
                media += found
        called = record.get("id")
        name = called if isinstance(called, str) else ""
        sample = sample_of(record, media, self.columns, where, name=name, alone=alone, folder=str(self.media))
        if self._quotes_are_text and any(_DOUBLED.fullmatch(cell) for cell in cells if cell):
            return sample._replace(rules=(*sample.rules, QUOTED))
        return sample

    def _column(self, record: dict[str, Any], kind: str, columns: Sequence[str], where: str) -> str:
        """The column with the media of a kind; empty if the record has none."""
        if kind in self.columns.names and columns[0] not in record:
            raise RecordError(f"{where} has no {columns[0]!r}; it has {', '.join(sorted(record)[:8])}")
        given = [name for name in columns if record.get(name) not in _NONE]
        if len(given) > 1:
            raise RecordError(f"{where} has both {' and '.join(given)}")
        if not given and kind not in self.columns.names:
            given = [FILE_NAME] if kind_of_file_name(record) == kind else []
        return given[0] if given else ""


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with open(file, encoding="utf-8-sig") as lines:
            start = lines.read(_LOOK).lstrip()[:1]
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
