"""A file about the shards of one folder: a JSON line, JSON texts, a table of shards, and a mapped part for each.

Parts do not depend on their position, so they are copied when others change. Checksums cover everything before the
parts (verified at opening), all parts together, and each part.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from data.errors import DataError
from data.storage.files import ShardVersion, cannot_write, open_file, replacing

_log = logging.getLogger(__name__)

CHECKED_AT_ONCE = 256 << 20
"""Up to this size, all parts are verified when the file is opened; in larger files, each at its first use."""
_VERSION = 10
_HEAD = 256  # bytes of the JSON line
UNIT = 64  # alignment of parts; bodies of a catalogue are padded to it
_SHARD = np.dtype(
    [("at", "<i8"), ("bytes", "<i8"), ("check", "<u8"), ("samples", "<i8"), ("members", "<i8"), ("keys", "<i8")]
    + [("codes", "<i8"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8"), ("content", "S32")]
)
STAMP = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("content", "S32"), ("tag", "<u8"), ("samples", "<i8")])
"""A shard's version without its change time and with a hashed tag, and its samples."""


@dataclass(frozen=True)
class Part:
    """A file's data about one shard."""

    name: str
    version: ShardVersion
    body: bytes | memoryview
    rows: tuple[int, int, int]
    """Number of samples, number of members, bytes of keys."""
    codes: tuple[tuple[str, ...], ...] = ()
    """Meanings of the codes in the rows."""


class IndexFile:
    """An open file. `table`: [shards] of `_SHARD`, named by `names`; `bytes`: uint8, the whole file."""

    def __init__(self, path: Path, content: np.ndarray, table: np.ndarray, texts: dict[str, Any], begin: int) -> None:
        """Open the file. Raises DataError, KeyError or TypeError if `table` and `texts` do not match."""
        self.path, self.bytes, self.table = path, content, table
        self.names: list[str] = texts["names"]
        self._tags: dict[str, str] = texts["tags"]
        self._begin, self._check = begin, texts["check"]
        if not _are_texts(self.names) or len(self.names) != len(table) or len(set(self.names)) != len(table):
            raise DataError(f"it has no names of {len(table)} shards")
        if not isinstance(self._tags, dict) or not _are_texts([*self._tags.values()]):
            raise DataError("it has tags that are no texts")
        if not isinstance(texts["codes"], list) or not all(map(_are_texts, chain.from_iterable(texts["codes"]))):
            raise DataError("it has codes that are no texts")
        self.codes: list[tuple[tuple[str, ...], ...]] = [tuple(map(tuple, codes)) for codes in texts["codes"]]
        if not len(table):
            return
        at, lengths, size = table["at"], table["bytes"], len(content)
        if at.min() < begin or lengths.min() < 0 or lengths.max() > size or (at > size - lengths).any():
            raise DataError("it has a shard whose part is not in it")
        if (at % 4).any() or (len(self.codes) and table["codes"].min() < 0) or table["codes"].max() >= len(self.codes):
            raise DataError("it has a shard whose codes or part are not in it")
        if table["size"].min() < 0 or not np.ascontiguousarray(table["content"]).tobytes().isascii():
            raise DataError("it has a shard of an impossible version")

    @property
    def is_small(self) -> bool:
        """True up to CHECKED_AT_ONCE."""
        return len(self.bytes) <= CHECKED_AT_ONCE

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Name -> row."""
        return {name: row for row, name in enumerate(self.names)}

    def rows_of(self, names: Sequence[str]) -> np.ndarray:
        """Return the rows of shards, int64; -1 if missing."""
        if names == self.names:
            return np.arange(len(names))
        return np.array([self.row_of.get(name, -1) for name in names], dtype=np.int64)

    def version(self, row: int) -> ShardVersion:
        """Return the version of the shard in its part."""
        entry = self.table[row]
        times = int(entry["mtime_ns"]), int(entry["ctime_ns"])
        return ShardVersion(int(entry["size"]), *times, entry["content"].decode(), self._tags.get(str(row), ""))

    def stamps(self, rows: np.ndarray) -> np.ndarray:
        """Return `STAMP` of rows."""
        stamps = np.zeros(len(rows), dtype=STAMP)
        for name in ("size", "mtime_ns", "content", "samples"):
            stamps[name] = self.table[name][rows]
        if self._tags:
            hashes = np.zeros(len(self.table), dtype=np.uint64)
            for row, tag in self._tags.items():
                hashes[int(row)] = xxh3_64_intdigest(tag.encode())
            stamps["tag"] = hashes[rows]
        return stamps

    def body(self, row: int) -> memoryview:
        """Return the bytes of a part."""
        entry = self.table[row]
        return memoryview(self.bytes)[int(entry["at"]) : int(entry["at"]) + int(entry["bytes"])]

    def part(self, row: int) -> Part:
        """Return the part of a shard."""
        entry = self.table[row]
        rows = int(entry["samples"]), int(entry["members"]), int(entry["keys"])
        return Part(self.names[row], self.version(row), self.body(row), rows, self.codes[int(entry["codes"])])

    def is_intact(self) -> bool:
        """True if the checksum of all parts together matches; much faster than one by one."""
        return xxh3_64_intdigest(memoryview(self.bytes)[self._begin :]) == self._check

    def is_part_intact(self, row: int) -> bool:
        """True if the checksum of a part matches."""
        return xxh3_64_intdigest(self.body(row)) == int(self.table["check"][row])


def write_file(path: Path, parts: Sequence[Part], what: str) -> None:
    """Write or replace the file `what`. Raises DataError if it cannot be written."""
    parts = sorted(parts, key=lambda part: part.name)
    known: dict[tuple[tuple[str, ...], ...], int] = {}
    table, all_parts, offset = np.zeros(len(parts), dtype=_SHARD), xxh3_64(), 0
    for row, part in zip(table, parts, strict=True):
        version, length = part.version, len(part.body)
        row["at"], row["bytes"], row["check"] = offset, length, xxh3_64_intdigest(part.body)
        row["samples"], row["members"], row["keys"] = part.rows
        row["codes"] = known.setdefault(part.codes, len(known))
        row["size"], row["mtime_ns"], row["ctime_ns"] = version.size, version.mtime_ns, version.ctime_ns
        row["content"] = version.content.encode()
        all_parts.update(part.body)
        offset += length
    tags = {str(number): part.version.tag for number, part in enumerate(parts) if part.version.tag}
    texts = {"names": [part.name for part in parts], "tags": tags, "codes": [*known], "check": all_parts.intdigest()}
    text = json.dumps(texts).encode()
    text += b" " * (-len(text) % UNIT)
    gap = bytes(-table.nbytes % UNIT)
    begin = _HEAD + len(text) + table.nbytes + len(gap)
    table["at"] += begin
    before = text + table.tobytes() + gap
    meta = {"version": _VERSION, "texts": len(text), "shards": len(parts), "bytes": begin + offset}
    line = json.dumps(meta | {"check": _head_check(meta, before)}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readable by everyone who can read the shards, for any umask.
        with replacing(path, mode=0o644) as file:
            file.write(line.ljust(_HEAD - 1) + b"\n" + before)
            for part in parts:
                file.write(part.body)
    except OSError as error:
        raise cannot_write(what, path, error) from error


def load_file(path: Path, what: str) -> IndexFile | None:
    """Open a file without reading its parts; None if it is missing, damaged, or of another version."""
    try:
        with open(open_file(path), "rb") as file:
            head = file.read(_HEAD)
            meta = json.loads(head)
            if meta["version"] != _VERSION:
                return None
            if os.fstat(file.fileno()).st_size != meta["bytes"]:
                raise DataError(f"expected {meta['bytes']} bytes")
            # Maps the file just read, even if another process has replaced it.
            content = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
        check, text_end = meta.pop("check"), _HEAD + meta["texts"]
        table_end = text_end + meta["shards"] * _SHARD.itemsize
        begin = table_end + -(table_end - text_end) % UNIT
        if check != _head_check(meta, memoryview(content)[_HEAD:begin]):
            raise DataError("its checksum is wrong")
        texts = json.loads(bytes(content[_HEAD:text_end]))
        return IndexFile(path, content, content[text_end:table_end].view(_SHARD), texts, begin)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("%s: damaged (%s), made again: %s", path, what, error)
        return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _head_check(meta: Mapping[str, int], before: bytes | memoryview) -> int:
    return xxh3_64_intdigest(before, seed=xxh3_64_intdigest(json.dumps(meta, sort_keys=True).encode()))


@dataclass
class Located:
    """The parts of shards, by shard number.

    Attributes:
        files: files with a part.
        file: int32 [shards], index into `files`; -1 without a part.
        row: int64 [shards], row in that file's table.
    """

    files: list[IndexFile]
    file: np.ndarray
    row: np.ndarray

    @classmethod
    def none(cls, shards: int) -> Located:
        """Return an empty result for `shards` shards."""
        return cls([], np.full(shards, -1, dtype=np.int32), np.full(shards, -1, dtype=np.int64))

    @property
    def missing(self) -> np.ndarray:
        """bool [shards]: True without a part."""
        return self.file < 0

    def take(self, file: IndexFile, rows: np.ndarray, which: np.ndarray) -> None:
        """Add a file's parts, at `rows` [shards], of the shards `which`, int64."""
        if len(which):
            self.file[which], self.row[which] = len(self.files), rows[which]
            self.files.append(file)

    def add(self, other: Located, numbers: Sequence[int]) -> None:
        """Add the parts of other shards; `numbers` are their numbers here."""
        of = np.asarray(numbers)
        self.file[of] = np.where(other.missing, -1, other.file + len(self.files))
        self.row[of] = other.row
        self.files += other.files
