"""What is known of a source before shards are written: of each of its parts a file of what its samples consist of. A
part that is whole is not read again after a kill.

Records, and media that have no place of their own (those in parquet), are copied into `PART.bytes`, and behind those of
a sample a line that has its members, each with its extension, file, offset and size. `PART.rows` is an array of what
shards are planned by. `PART.json` is written last.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from data.build.samples import Sample, Source
from data.errors import DataError, NothingToLearn, RecordError, ShardError, UnknownRecord
from data.records.members import arrange
from data.storage.files import replacing
from data.storage.files import pread_all
from data.storage.write import ShardFile, tar_bytes

ROW = np.dtype([("at", "<i8"), ("length", "<i8"), ("line", "<i8"), ("bytes", "<i8"), ("name", "<u8")])
"""Of a sample: where its record and line are in `PART.bytes`, how long both are, and the line alone; what it takes in a
shard; a hash of its name, 0 without."""
_SPOOL = ""  # the file of a member that is in `PART.bytes`
_TOGETHER = 1 << 14  # bytes of a member that is read with the line behind it
_WHOLE = ""  # the offset of a member that is a whole file
_BETWEEN = "\0"  # the fields of a line: neither files nor members have it in their names
_SHOWN = 10000  # characters of a reason


@dataclass(frozen=True)
class Part:
    """What was found in a part of the source."""

    samples: int
    faults: list[str]
    """A sentence for each row that cannot be used."""
    nulls: dict[str, tuple[int, str]]
    """Rows without anything to learn: `NothingToLearn.what` -> (how many, the first)."""
    rules: dict[str, int]
    """How many samples each rule changed."""
    media: dict[str, int]
    """How many images, videos and clips the samples have, by kind."""
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
    rows = array("Q")  # of `ROW`, which has no number below 0
    faults: list[str] = []
    rules: Counter[str] = Counter()
    media: Counter[str] = Counter()
    nulls: dict[str, tuple[int, str]] = {}
    seen, unknown = 0, 0
    with replacing(part_path(folder, number, "bytes")) as spool:
        spooled = 0
        for make in _rows(source, source.parts[number], faults):
            seen += 1
            if progress and seen % 1000 == 0:
                progress(1000)
            try:
                sample = make()
            except NothingToLearn as error:
                count, first = nulls.get(error.what, (0, str(error)[:_SHOWN]))
                nulls[error.what] = count + 1, first
                continue
            except RecordError as error:
                faults.append(str(error)[:_SHOWN])
                unknown += isinstance(error, UnknownRecord)
                continue
            if sample is None:
                continue
            members, called, changed = sample
            fields: list[str] = []
            sizes: list[int] = []
            together = spooled
            for extension, content in members:
                if isinstance(content, bytes):
                    size = len(content)
                    fields.append(_BETWEEN.join((extension, _SPOOL, str(spooled), str(size))))
                    spooled += spool.write(content)
                    if size > _TOGETHER:
                        together = spooled
                else:
                    path, offset, size = content
                    at = _WHOLE if offset is None else str(offset)
                    fields.append(_BETWEEN.join((extension, path, at, str(size))))
                sizes.append(size)
            line = _BETWEEN.join(fields).encode("utf-8", "surrogatepass")
            spooled += spool.write(line)
            name = xxh3_64_intdigest(called.encode("utf-8", "surrogateescape")) or 1 if called else 0
            rows.extend((together, spooled - together, len(line), tar_bytes(sizes), name))
            if changed:
                rules.update(changed)
            media.update(arrange(tuple([extension for extension, _ in members])).kinds)
    with replacing(part_path(folder, number, "rows")) as file:
        file.write(np.array(rows, dtype="<u8").tobytes())
    part = Part(len(rows) * rows.itemsize // ROW.itemsize, faults, nulls, dict(rules), dict(media), unknown)
    with replacing(part_path(folder, number, "json")) as file:
        file.write(json.dumps(part.__dict__).encode())
    if progress:
        progress(seen % 1000)
    return part


def _rows(source: Source, part: Path, faults: list[str]) -> Iterator[Callable[[], Sample | None]]:
    try:
        for _, make in source.rows(part):
            yield make
    except ShardError as error:
        faults.append(f"{error} Of this tar nothing was taken.")


def rows_of(folder: Path, parts: int) -> list[np.ndarray]:
    """`ROW` of every sample, by part."""
    return [np.fromfile(part_path(folder, number, "rows"), dtype=ROW) for number in range(parts)]


class Contents:
    """Copies what samples consist of. Keeps a few files open: tars and spools have many samples each."""

    _MOST = 16

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, int] = {}
        self._spools: dict[int, str] = {}

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop(next(iter(self._open))))

    def copy(self, shard: ShardFile, row: int, part: int, at: int, length: int, line: int) -> None:
        """Write the members of a sample as `row` of a shard.

        Args:
            part, at, length, line: where it is, see `ROW`.

        Raises:
            DataError: a file is not as it was when it was read.
        """
        spool = self._spools.get(part) or self._spools.setdefault(part, str(part_path(self._folder, part, "bytes")))
        raw = pread_all(self._fd(spool), length, at)
        _require(len(raw) == length, spool)
        fields = iter(raw[length - line :].decode("utf-8", "surrogatepass").split(_BETWEEN))
        for extension, path, where, number in zip(fields, fields, fields, fields, strict=True):
            size = int(number)
            if where == _WHOLE:
                _copy_whole(shard, row, extension, path, size)
            elif path == _SPOOL and int(where) >= at:
                start = int(where) - at
                shard.add(row, extension, raw[start : start + size])
            else:
                path = path or spool
                _require(shard.copy(row, extension, self._fd(path), int(where), size), path)

    def _fd(self, path: str) -> int:
        fd = self._open.get(path)
        if fd is None:
            if len(self._open) >= self._MOST:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return fd


def _copy_whole(shard: ShardFile, row: int, extension: str, path: str, size: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The size first: a file that has grown would be cut.
        _require(os.lseek(fd, 0, os.SEEK_END) == size and shard.copy(row, extension, fd, 0, size), path)
    finally:
        os.close(fd)


def _require(as_it_was: bool, path: str) -> None:
    if not as_it_was:
        raise DataError(f"{path} changed while shards were built of it: remove what was built, and start again")
