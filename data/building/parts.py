"""What is known of a source before shards are written: of each of its parts a file of what its samples consist of. A
part that is whole is not read again after a kill.

Records, and media that have no place of their own (those in parquet), are copied into `PART.bytes`; `PART.lines` has
for every sample the members, each its extension, file, offset and size, as JSON; `PART.rows` an array of what shards
are planned by. `PART.json` is written last.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from data.building.samples import Place, Sample, Source
from data.errors import DataError, NothingToLearn, RecordError, ShardError, UnknownRecord
from data.storage.replace import replacing
from data.storage.whole_read import pread_all
from data.storage.write import tar_bytes

ROW = np.dtype([("at", "<i8"), ("length", "<i8"), ("bytes", "<i8"), ("name", "<u8")])
"""Of a sample: where its line is, how long; what it takes in a shard; a hash of its name, 0 without."""
SPOOL = ""
"""The file of a member that is in `PART.bytes`."""
_SHOWN = 10000  # characters of a reason


@dataclass(frozen=True)
class Part:
    """What was found in a part of the source."""

    samples: int
    faults: list[str]
    """A sentence for each row that cannot be used."""
    nulls: int
    """Rows whose caption or answer is null or blank."""
    first_null: str
    rules: dict[str, int]
    """How many samples each rule changed."""
    unknown: int = 0
    """Of `faults`, those of records with none of the names that say what they are."""


def part_path(folder: Path, number: int, suffix: str) -> Path:
    """A file of part `number`."""
    return folder / f"part-{number:06d}.{suffix}"


def done_part(folder: Path, number: int) -> Part | None:
    """A part that is whole; None if it is not."""
    try:
        return Part(**json.loads(part_path(folder, number, "json").read_bytes()))
    except FileNotFoundError:
        return None


def read_part(source: Source, folder: Path, number: int, progress: Callable[[int], None] | None = None) -> Part:
    """Read a part of the source and write what was found.

    Args:
        progress: called with the number of rows that were read since the last call.

    Raises:
        DataError: the part cannot be read; of tars one that is damaged is a fault among others.
    """
    rows: list[tuple[int, int, int, int]] = []
    faults: list[str] = []
    rules: Counter[str] = Counter()
    nulls, first_null, seen, unknown = 0, "", 0, 0
    with (
        replacing(part_path(folder, number, "bytes")) as spool,
        replacing(part_path(folder, number, "lines")) as lines,
    ):
        spooled = at = 0
        for make in _rows(source, source.parts[number], faults):
            seen += 1
            if progress and seen % 1000 == 0:
                progress(1000)
            try:
                sample = make()
            except NothingToLearn as error:
                nulls, first_null = nulls + 1, first_null or str(error)[:_SHOWN]
                continue
            except RecordError as error:
                faults.append(str(error)[:_SHOWN])
                unknown += isinstance(error, UnknownRecord)
                continue
            if sample is None:
                continue
            places: list[tuple[str, str, int | None, int]] = []
            for extension, content in sample.members:
                if isinstance(content, Place):
                    places.append((extension, *content))
                else:
                    places.append((extension, SPOOL, spooled, len(content)))
                    spooled += spool.write(content)
            line = json.dumps(places).encode()
            name = xxh3_64_intdigest(sample.name.encode("utf-8", "surrogateescape")) or 1 if sample.name else 0
            rows.append((at, len(line), tar_bytes(place[3] for place in places), name))
            at += lines.write(line)
            rules.update(sample.rules)
    with replacing(part_path(folder, number, "rows")) as file:
        file.write(np.array(rows, dtype=ROW).tobytes())
    part = Part(len(rows), faults, nulls, first_null, dict(rules), unknown)
    with replacing(part_path(folder, number, "json")) as file:
        file.write(json.dumps(part.__dict__).encode())
    if progress:
        progress(seen % 1000)
    return part


def _rows(source: Source, part: Path, faults: list[str]) -> Iterator[Callable[[], Sample | None]]:
    try:
        yield from (make for _, make in source.rows(part))
    except ShardError as error:
        faults.append(f"{error} Of this tar nothing was taken.")


def rows_of(folder: Path, parts: int) -> list[np.ndarray]:
    """`ROW` of every sample, by part."""
    return [np.fromfile(part_path(folder, number, "rows"), dtype=ROW) for number in range(parts)]


class Contents:
    """Reads what samples consist of. Keeps a few files open: tars and spools have many samples each."""

    _MOST = 16

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop(next(iter(self._open))))

    def of(self, part: int, at: int, length: int) -> list[tuple[str, bytes]]:
        """(extension, content) of a sample's members. Raises DataError: a file is not as it was when it was read."""
        line = pread_all(self._fd(str(part_path(self._folder, part, "lines"))), length, at)
        members = []
        for extension, path, offset, size in json.loads(line):
            if offset is None:
                members.append((extension, self._whole(path, size)))
                continue
            path = path or str(part_path(self._folder, part, "bytes"))
            content = pread_all(self._fd(path), size, offset)
            _require_size(path, size, len(content))
            members.append((extension, content))
        return members

    def _whole(self, path: str, size: int) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = pread_all(fd, size + 1, 0)
        finally:
            os.close(fd)
        _require_size(path, size, len(content))
        return content

    def _fd(self, path: str) -> int:
        if path not in self._open:
            if len(self._open) >= self._MOST:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]


def _require_size(path: str, wanted: int, found: int) -> None:
    if wanted != found:
        raise DataError(f"{path} changed while shards were built of it: remove what was built, and start again")
