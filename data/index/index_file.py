"""A file about the shards of one folder, such as its catalogue: a JSON line, JSON texts, a table, and parts of shards.

Parts do not depend on their position, so they are copied when others change. Checksums cover the head and each part. A
file is verified when it is opened, and damaged parts are made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from data.errors import DataError
from data.storage.files import ShardVersion, file_lock, open_file, replacing
from data.storage.url import Place, Url, place_of

_log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
"""Seconds of work between saves."""
UNIT = 64
"""Alignment of parts; bodies of a catalogue are padded to it."""
STAMP = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("content", "S32"), ("tag", "<u8"), ("samples", "<i8")])
"""A shard's version without its change time and with a hashed tag, and its samples."""
_VERSION = 14
"""Raise it if the format changes, or an extension gets another kind."""
_HEAD = 256  # bytes of the JSON line
_SHARD = np.dtype(
    [("at", "<i8"), ("bytes", "<i8"), ("check", "<u8"), ("samples", "<i8"), ("members", "<i8"), ("keys", "<i8")]
    + [("codes", "<i8"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8"), ("content", "S32")]
)


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

    def __init__(self, path: Path, content: np.ndarray, table: np.ndarray, texts: dict[str, Any]) -> None:
        self.path, self.bytes, self.table = path, content, table
        self.names: list[str] = texts["names"]
        self._tags: dict[str, str] = texts["tags"]
        self.codes: list[tuple[tuple[str, ...], ...]] = [tuple(map(tuple, codes)) for codes in texts["codes"]]

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

    def is_intact(self, row: int) -> bool:
        """True if the checksum of a part matches."""
        return xxh3_64_intdigest(self.body(row)) == int(self.table["check"][row])


def write_file(path: Path, parts: Sequence[Part], what: str) -> None:
    """Write or replace the file `what`. Raises DataError if it cannot be written."""
    parts = sorted(parts, key=lambda part: part.name)
    code_numbers: dict[tuple[tuple[str, ...], ...], int] = {}
    table, offset = np.zeros(len(parts), dtype=_SHARD), 0
    for row, part in zip(table, parts, strict=True):
        version, length = part.version, len(part.body)
        row["at"], row["bytes"], row["check"] = offset, length, xxh3_64_intdigest(part.body)
        row["samples"], row["members"], row["keys"] = part.rows
        row["codes"] = code_numbers.setdefault(part.codes, len(code_numbers))
        row["size"], row["mtime_ns"], row["ctime_ns"] = version.size, version.mtime_ns, version.ctime_ns
        row["content"] = version.content.encode()
        offset += length
    tags = {str(number): part.version.tag for number, part in enumerate(parts) if part.version.tag}
    text = json.dumps({"names": [part.name for part in parts], "tags": tags, "codes": [*code_numbers]}).encode()
    text += b" " * (-len(text) % UNIT)
    gap = bytes(-table.nbytes % UNIT)
    table["at"] += _HEAD + len(text) + table.nbytes + len(gap)
    before = text + table.tobytes() + gap
    meta = {"version": _VERSION, "texts": len(text), "shards": len(parts), "bytes": _HEAD + len(before) + offset}
    line = json.dumps(meta | {"check": _head_check(meta, before)}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readable by everyone who can read the shards, for any umask.
        with replacing(path, mode=0o644) as file:
            file.write(line.ljust(_HEAD - 1) + b"\n" + before)
            for part in parts:
                file.write(part.body)
    except OSError as error:
        raise _cannot_write(what, path, error) from error


def load_file(path: Path, what: str) -> IndexFile | None:
    """Open a file without reading its parts; None if it is missing, damaged, or of another version."""
    try:
        with open(open_file(path), "rb") as file:
            meta = json.loads(file.read(_HEAD))
            if meta["version"] != _VERSION:
                return None
            # Maps the file just read, even if another process has replaced it.
            content = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
        check, text_end = meta.pop("check"), _HEAD + meta["texts"]
        table_end = text_end + meta["shards"] * _SHARD.itemsize
        before = memoryview(content)[_HEAD : table_end + -(table_end - text_end) % UNIT]
        if len(content) != meta["bytes"] or check != _head_check(meta, before):
            raise DataError(f"wrong checksum, or {len(content)} of {meta['bytes']} bytes")
        return IndexFile(
            path, content, content[text_end:table_end].view(_SHARD), json.loads(bytes(content[_HEAD:text_end]))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("%s: damaged (%s), made again: %s", path, what, error)
        return None


def _head_check(meta: Mapping[str, int], before: bytes | memoryview) -> int:
    return xxh3_64_intdigest(before, seed=xxh3_64_intdigest(json.dumps(meta, sort_keys=True).encode()))


def _cannot_write(what: str, path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write the {what} {path} ({error.strerror}). Set data.cache_dir to a folder that can be written, on a "
        "disk with free space"
    )


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

    def add(self, other: Located, numbers: Sequence[int]) -> None:
        """Add the parts of other shards; `numbers` are their numbers here."""
        self.file[numbers] = np.where(other.missing, -1, other.file + len(self.files))
        self.row[numbers] = other.row
        self.files += other.files


class FolderFile:
    """The file about the shards of one folder: next to them, in `data.cache_dir`, or in the user's cache.

    `located` has the shards' parts after `load`. `what` names the file in messages.
    """

    def __init__(
        self, shards: Sequence[Place], cache_dir: str | os.PathLike[str] | None, suffix: str, what: str
    ) -> None:
        self._names = [shard.name for shard in shards]
        self._folder = shards[0].parent
        self.path = catalogue_path(shards[0], cache_dir, writable=True, suffix=suffix)
        self._paths = list(dict.fromkeys([catalogue_path(shards[0], cache_dir, suffix=suffix), self.path]))
        self._what = what
        self.located = Located.none(len(shards))

    def load(self, current: Callable[[IndexFile, np.ndarray, np.ndarray], np.ndarray]) -> None:
        """Locate parts. `current`: (file, rows of all shards in it, candidate shards) -> current candidates."""
        located = Located.none(len(self._names))
        for file in self._files():
            rows = file.rows_of(self._names)
            shards = current(file, rows, np.flatnonzero(located.missing & (rows >= 0)))
            intact = np.array([file.is_intact(row) for row in rows[shards].tolist()], dtype=bool)
            for shard in shards[~intact].tolist():
                _log.warning("%s: damaged (%s of %s), made again", file.path, self._what, self._names[shard])
            shards = shards[intact]
            located.file[shards], located.row[shards] = len(located.files), rows[shards]
            located.files.append(file)
        self.located = located

    def save(self, parts: Mapping[str, Part], versions: Mapping[str, ShardVersion]) -> None:
        """Save new parts, updated versions, and the existing parts of all existing shards. Raises DataError."""
        kept, wanted = dict(parts), set(self._names)
        for file in self._files():
            for name, row in file.row_of.items():
                if name in kept or not file.is_intact(row):
                    continue
                # Another shard of the folder stays while it exists, or may exist.
                exists = not isinstance(self._folder, Path) or (self._folder / name).exists()
                if name in wanted or (file.path == self.path and exists):
                    part = file.part(row)
                    kept[name] = replace(part, version=versions[name]) if name in versions else part
        write_file(self.path, [*kept.values()], self._what)

    def lock(self, *, wait: bool = True) -> AbstractContextManager[None]:
        """Hold the lock that keeps other processes from making the same parts. Raises Busy, DataError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self._what, self.path, error) from error
        return file_lock(self.path.with_name(self.path.name + ".lock"), wait=wait)

    def _files(self) -> list[IndexFile]:
        return [file for path in self._paths if (file := load_file(path, self._what)) is not None]


def by_folder(shards: Sequence[Place]) -> list[list[int]]:
    """Group shard numbers by folder, in order of first occurrence."""
    numbers: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(str(shard).rpartition("/")[0], []).append(number)
    return [*numbers.values()]


def catalogue_path(
    shard: str | os.PathLike[str] | Url,
    cache_dir: str | os.PathLike[str] | None = None,
    writable: bool = False,
    suffix: str = ".mimo-catalogue",
) -> Path:
    """Return the path of a folder's catalogue, or of another file about its shards. It is next to the shards, or in
    `cache_dir` if given. URLs use the user's cache folder. With `writable`, so do folders without write permission."""
    folder = place_of(shard).absolute().parent
    if cache_dir is None and isinstance(folder, Path) and not (writable and not os.access(folder, os.W_OK)):
        return folder / f"shards{suffix}"
    kept = cache_folder(None) / "index" if cache_dir is None else cache_folder(cache_dir)
    # The hash distinguishes folders with the same name.
    return kept / f"{folder.name}.{hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:12]}{suffix}"


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return `cache_dir`, or the user's cache. Raises DataError without a home folder."""
    try:
        if cache_dir is not None:
            return Path(cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-train"
    except RuntimeError as error:
        raise DataError(
            f"data.cache_dir: {cache_dir or 'is empty'}, and this user has no home folder (HOME). Set it to a folder "
            "that can be written"
        ) from error
