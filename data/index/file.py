"""The file of a catalogue: the indexes of the shards of one folder, mapped into memory.

It is one JSON line (padded), texts (names and tags of the shards, what the codes of their rows mean), a table with a
row for each shard, and a part for each: rows of its samples and members (`data.index`), and its keys, compressed.
Nothing in a part says where it stands, so that a part is copied as it is when another one changes.

Three kinds of checksums: one of all that is before the parts, compared when the file is opened, one of all parts
together, and one of each.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from data.errors import DataError
from data.index.checks import codes_of, require_head, require_table, require_tags, rows_fault
from data.index.named import Named
from data.index.shard_index import MEMBER, SAMPLE, Codes, ShardIndex
from data.storage.files import ShardVersion, cannot_write, open_file, replacing
from data.storage.url import Place

_log = logging.getLogger(__name__)

CHECKED_AT_ONCE = 256 << 20
"""Bytes of a file up to which all parts that are used are compared with their checksums when it is opened; of a larger
one each is when it is first used."""
_VERSION = 9
_HEAD = 256  # bytes of the JSON line
_UNIT = 64  # parts begin at multiples of it
_SHARD = np.dtype(
    [("at", "<i8"), ("samples", "<i8"), ("members", "<i8"), ("keys", "<i8"), ("check", "<u8"), ("codes", "<i8")]
    + [("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8"), ("content", "S32")]
)


@dataclass(frozen=True)
class Part:
    """What a catalogue has of one shard."""

    name: str
    version: ShardVersion
    codes: Codes
    rows: tuple[int, int, int]
    """Samples, members, bytes of keys."""
    body: bytes | memoryview

    @classmethod
    def of(cls, index: ShardIndex) -> Part:
        """That of a shard that has been read."""
        rows = len(index), len(index.all_members), len(index.packed_keys)
        body = b"".join((index.samples.tobytes(), index.all_members.tobytes(), index.packed_keys))
        return cls(index.path.name, index.version, index.codes, rows, body + bytes(-len(body) % _UNIT))

    def index(self, path: Place, kept_in: Path | None = None) -> ShardIndex:
        """As an index to read; `fault` has been asked. `kept_in`: the file that it is of."""
        samples, members, keys = self.rows
        ends = np.cumsum([0, (samples + 1) * SAMPLE.itemsize, members * MEMBER.itemsize, keys]).tolist()
        return ShardIndex(
            path=path,
            version=self.version,
            codes=self.codes,
            samples=np.frombuffer(self.body[: ends[1]], dtype=SAMPLE),
            all_members=np.frombuffer(self.body[ends[1] : ends[2]], dtype=MEMBER),
            packed_keys=bytes(self.body[ends[2] : ends[3]]),
            kept_in=kept_in,
        )

    def fault(self) -> str:
        """Why it cannot be what the shard has; empty: it can. Its keys are looked at when they are read."""
        if len(self.body) != body_bytes(*self.rows):
            return "rows of another length"
        return rows_fault(self.body, self.rows, self.version.size, self.codes)

    def head(self) -> bytes:
        """All but the body, as JSON."""
        return json.dumps([_VERSION, self.name, astuple(self.version), astuple(self.codes), self.rows]).encode()

    @classmethod
    def from_head(cls, head: bytes, body: bytes | memoryview) -> Part:
        """Raises ValueError, TypeError for what is none."""
        program, name, version, codes, rows = json.loads(head)
        if program != _VERSION:
            raise DataError(f"indexed by version {program}, and this is {_VERSION}")
        require_head(name, version, rows)
        return cls(name, ShardVersion(*version), codes_of(codes), tuple(rows), body)


class CatalogueFile(Named):
    """An open file.

    Attributes:
        names: of the shards, each of a row in `table`.
        table: [shards] of `_SHARD`.
        words: int64, the whole file.
    """

    def __init__(
        self, path: Path, blob: np.ndarray, table: np.ndarray, texts: dict[str, Any], begin: int, check: int
    ) -> None:
        """
        Args:
            begin: first byte of the parts.
            check: of all parts together.

        Raises:
            DataError, KeyError, TypeError: table and texts do not fit each other or the file.
        """
        self.path, self.table = path, table
        self.words = blob[: len(blob) // 8 * 8].view("<i8")
        super().__init__(texts["names"], len(table))
        require_tags(texts["tags"])
        self.codes = [codes_of(codes) for codes in texts["codes"]]
        self._tags, self._bytes, self._check = texts["tags"], memoryview(blob), check
        lengths = body_bytes(table["samples"], table["members"], table["keys"])
        require_table(table, lengths, begin, len(blob), _UNIT, len(self.codes))

    @property
    def is_checked_at_once(self) -> bool:
        """See CHECKED_AT_ONCE."""
        return 8 * len(self.words) <= CHECKED_AT_ONCE

    def version(self, number: int) -> ShardVersion:
        """The shard's content when it was indexed."""
        row = self.table[number]
        times = int(row["mtime_ns"]), int(row["ctime_ns"])
        return ShardVersion(int(row["size"]), *times, row["content"].decode(), self.tag(number))

    def tag(self, number: int) -> str:
        """`ShardVersion.tag`."""
        return self._tags.get(str(number), "")

    def hashed_tags(self) -> np.ndarray:
        """uint64 [shards]: a hash of each tag; 0: it has none."""
        found = np.zeros(len(self.table), dtype=np.uint64)
        for number, tag in self._tags.items():
            found[int(number)] = xxh3_64_intdigest(tag.encode())
        return found

    def part(self, number: int) -> Part:
        """What it has of a shard."""
        row = self.table[number]
        rows = int(row["samples"]), int(row["members"]), int(row["keys"])
        start = int(row["at"])
        body = self._bytes[start : start + body_bytes(*rows)]
        return Part(self.names[number], self.version(number), self.codes[int(row["codes"])], rows, body)

    def are_all_whole(self) -> bool:
        """Whether all parts together have their checksum: much faster than one by one."""
        begin = int(self.table["at"][0]) if len(self.table) else len(self._bytes)
        return xxh3_64_intdigest(self._bytes[begin:]) == self._check

    def is_whole(self, number: int) -> bool:
        """Whether a part has its checksum."""
        row = self.table[number]
        start = int(row["at"])
        length = body_bytes(int(row["samples"]), int(row["members"]), int(row["keys"]))
        return xxh3_64_intdigest(self._bytes[start : start + length]) == int(row["check"])


def body_bytes[Number: (int, np.ndarray)](samples: Number, members: Number, keys: Number) -> Number:
    """Length of a part with so many rows and bytes of keys."""
    length = (samples + 1) * SAMPLE.itemsize + members * MEMBER.itemsize + keys
    return -(-length // _UNIT) * _UNIT


def write_catalogue(path: Path, parts: Iterable[Part]) -> None:
    """Writes the file in place of another one.

    Raises:
        DataError: it cannot be written.
    """
    parts = sorted(parts, key=lambda part: part.name)
    known: dict[Codes, int] = {}
    table = np.zeros(len(parts), dtype=_SHARD)
    for row, part in zip(table, parts, strict=True):
        version = part.version
        row["samples"], row["members"], row["keys"] = part.rows
        row["size"], row["mtime_ns"], row["ctime_ns"] = version.size, version.mtime_ns, version.ctime_ns
        row["content"], row["check"] = version.content.encode(), xxh3_64_intdigest(part.body)
        row["codes"] = known.setdefault(part.codes, len(known))
    tags = {str(number): part.version.tag for number, part in enumerate(parts) if part.version.tag}
    texts = {"names": [part.name for part in parts], "tags": tags, "codes": [astuple(codes) for codes in known]}
    text = json.dumps(texts).encode()
    text += b" " * (-len(text) % _UNIT)
    lengths = [len(part.body) for part in parts]
    gap = -table.nbytes % _UNIT
    begin = _HEAD + len(text) + table.nbytes + gap
    table["at"] = begin + np.cumsum([0, *lengths])[:-1]
    before = text + table.tobytes() + bytes(gap)
    whole = xxh3_64()
    for part in parts:
        whole.update(part.body)
    meta = {"version": _VERSION, "texts": len(text), "shards": len(parts), "bytes": begin + sum(lengths)}
    meta |= {"parts": whole.intdigest()}
    line = json.dumps(meta | {"check": f"{_check(meta, before):016x}"}).encode()
    head = line + b" " * (_HEAD - len(line) - 1) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads the shards may read their indexes, whatever the umask of the user who made them.
        with replacing(path, mode=0o644) as file:
            file.write(head + before)
            for part in parts:
                file.write(part.body)
    except OSError as error:
        raise cannot_write("index", path, error) from error


def load_catalogue(path: Path) -> CatalogueFile | None:
    """The file, without its parts being looked at; None if it is absent, of another version, or damaged."""
    try:
        with open(open_file(path), "rb") as file:
            head = file.read(_HEAD)
            meta = json.loads(head)
            if meta["version"] != _VERSION:
                return None
            if os.fstat(file.fileno()).st_size != meta["bytes"]:
                raise DataError("it has another length")
            # One mapping for everything, of the file that was just looked at, also if another process has replaced it.
            blob = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
        check, at = int(meta.pop("check"), 16), len(head) + meta["texts"]
        if min(meta["texts"], meta["shards"]) < 0:
            raise DataError("it has negative sizes")
        end = at + meta["shards"] * _SHARD.itemsize
        end += -(end - at) % _UNIT
        if check != _check(meta, memoryview(blob)[len(head) : end]):
            raise DataError("its checksum is wrong")
        texts = json.loads(bytes(blob[len(head) : at]))
        table = blob[at : at + meta["shards"] * _SHARD.itemsize].view(_SHARD)
        return CatalogueFile(path, blob, table, texts, end, meta["parts"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _log.warning("%s: the index is damaged or cannot be read, and built again: %s", path, error)
        return None


def with_version(part: Part, version: ShardVersion) -> Part:
    """The part of a shard whose content is the same, and whose times are others."""
    return replace(part, version=version)


def _check(meta: dict[str, Any], before: bytes | memoryview) -> int:
    return xxh3_64_intdigest(before, seed=xxh3_64_intdigest(json.dumps(meta, sort_keys=True).encode()))
