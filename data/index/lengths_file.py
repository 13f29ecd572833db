"""The file with the lengths of the texts of a folder's shards, mapped into memory, beside the catalogue.

It is one JSON line (padded), int32 lengths shard by shard, a table with a row for each shard, and their names. One
checksum is of all but the lengths, one of all lengths together, and one of those of each shard.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from data.errors import DataError
from data.index.named import Named
from data.storage.files import cannot_write, open_file, replacing

_log = logging.getLogger(__name__)

STAMP = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("content", "S32"), ("tag", "<u8"), ("samples", "<i8")])
"""Of a shard whose texts were counted: what its version says of its content, its tag hashed, and its samples."""
_ROW = np.dtype([("first", "<i8"), ("check", "<u8"), ("stamp", STAMP)])
_VERSION = 1
_HEAD = 256  # bytes of the JSON line
_UNIT = 64  # the table begins at a multiple of it


class Part(NamedTuple):
    """The lengths of one shard: its name, a `STAMP` of it, and what reads them, int32 bytes."""

    name: str
    stamp: np.ndarray
    read: Callable[[], bytes | memoryview]


class LengthsFile(Named):
    """An open file.

    Attributes:
        names: of the shards, each of a row.
        stamps: [shards] `STAMP`.
        firsts: int64 [shards], where the lengths of each begin.
        lengths: int32, of all shards.
    """

    def __init__(self, path: Path, table: np.ndarray, names: list[str], lengths: np.ndarray, check: int) -> None:
        """Raises DataError, TypeError: table, names and lengths do not fit each other."""
        super().__init__(names, len(table))
        self.path, self.stamps, self.firsts, self.lengths = path, table["stamp"], table["first"], lengths
        self._checks, self._check = table["check"], check
        counts = self.stamps["samples"]
        if len(table) and (min(counts.min(), self.firsts.min()) < 0 or (self.firsts > len(lengths) - counts).any()):
            raise DataError("it has a shard whose lengths are not in it")

    def are_all_whole(self) -> bool:
        """Whether all lengths together have their checksum."""
        return xxh3_64_intdigest(self.lengths) == self._check

    def is_whole(self, row: int) -> bool:
        """Whether the lengths of a shard have theirs."""
        return xxh3_64_intdigest(self.of(row)) == int(self._checks[row])

    def of(self, row: int) -> np.ndarray:
        """The lengths of a shard."""
        first = int(self.firsts[row])
        return self.lengths[first : first + int(self.stamps["samples"][row])]


def write_lengths(path: Path, parts: Iterable[Part]) -> None:
    """Writes the file in place of another one.

    Raises:
        DataError: it cannot be written.
    """
    parts = sorted(parts, key=lambda part: part.name)
    table, whole, first = np.zeros(len(parts), dtype=_ROW), xxh3_64(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads the shards may read their lengths, whatever the umask of the user who counted them.
        with replacing(path, mode=0o644) as file:
            file.write(bytes(_HEAD))
            for row, part in zip(table, parts, strict=True):
                content = part.read()
                row["first"], row["check"], row["stamp"] = first, xxh3_64_intdigest(content), part.stamp
                first += len(content) // 4
                whole.update(content)
                file.write(content)
            file.write(bytes(-4 * first % _UNIT))
            behind = table.tobytes() + json.dumps([part.name for part in parts]).encode()
            file.write(behind)
            meta = {"version": _VERSION, "shards": len(parts), "samples": first, "bytes": file.tell()}
            meta |= {"lengths": whole.intdigest()}
            line = json.dumps(meta | {"check": f"{_check(meta, behind):016x}"}).encode()
            file.seek(0)
            file.write(line + b" " * (_HEAD - len(line) - 1) + b"\n")
    except OSError as error:
        raise cannot_write("text lengths", path, error) from error


def load_lengths(path: Path) -> LengthsFile | None:
    """The file, without its lengths being looked at; None if it is absent, of another version, or damaged."""
    try:
        with open(open_file(path), "rb") as file:
            meta = json.loads(file.read(_HEAD))
            if meta["version"] != _VERSION:
                return None
            if os.fstat(file.fileno()).st_size != meta["bytes"]:
                raise DataError("it has another length")
            # Of the file that was just looked at, also if another process has replaced it.
            blob = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
        check, samples, shards = int(meta.pop("check"), 16), meta["samples"], meta["shards"]
        if min(samples, shards) < 0:
            raise DataError("it has negative sizes")
        end = _HEAD + 4 * samples
        end += -end % _UNIT
        if check != _check(meta, memoryview(blob)[end:]):
            raise DataError("its checksum is wrong")
        lengths = blob[_HEAD : _HEAD + 4 * samples].view("<i4")
        table = blob[end : end + shards * _ROW.itemsize].view(_ROW)
        names = json.loads(bytes(blob[end + table.nbytes :]))
        return LengthsFile(path, table, names, lengths, meta["lengths"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError) as error:
        _log.warning("%s: the text lengths are damaged or cannot be read, and counted again: %s", path, error)
        return None


def _check(meta: Mapping[str, object], behind: bytes | memoryview) -> int:
    return xxh3_64_intdigest(behind, seed=xxh3_64_intdigest(json.dumps(meta, sort_keys=True).encode()))
