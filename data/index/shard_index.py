"""The index of one WebDataset shard: where each member of each sample is, and the size of its images.

A sample is a run of neighbouring tar members with one key. The key rule is WebDataset's: the key is the member's path
up to the FIRST dot of its base name, the extension is everything after it, in lower case. So `a/img.2024.01.jpg` has
the key `a/img` and the extension `2024.01.jpg`; names such as `img.2024.01` and `img.2024.02` share one key, and are
one sample when they are neighbours. Members whose base name starts with a dot (macOS writes `a/._img.jpg`) or has no
extension, and those named `__*__`, are skipped. What a member is (image, clip, record, nothing that is read) follows
from its extension and those of the others (`data.records.members`).

Indexes are built by `indexing`, and those of many shards are kept in one file (`catalogue`).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import DataError
from data.index.index_file import IndexFile
from data.records.members import NO_FIELDS, Arrangement, Fields, arrange, kind_of, unread
from data.storage.files import ShardVersion
from data.storage.url import Place

SAMPLE = np.dtype([("first_member", "<i8"), ("record", "<i4"), ("reason", "<i4")])
"""A sample: the first of its members, which of these is the record (-1: none), and, from 1 on, why it is bad."""
MEMBER = np.dtype([("offset", "<i8"), ("size", "<i8"), ("first", "<i8"), ("second", "<i4"), ("code", "<i4")])
"""A member: its bytes, its extent (`Member.extent`), and what it is (`Codes`). Of a video `first` is its height times
2^32 and its width, and `second` its milliseconds."""


class Frame(NamedTuple):
    """One of the images that are read of a video."""

    number: int
    of: int
    """How many are read."""


class Member(NamedTuple):
    """One file of a sample. `height`, `width`: pixels, after orientation; 0 if not an image or video, or unreadable.
    `frames`, `rate`: audio samples per channel and their number per second; 0 if not audio or unreadable."""

    extension: str
    offset: int
    size: int
    height: int
    width: int
    frames: int
    rate: int
    kind: str
    """"image", "video", "audio", or "other": its record, and what is not read."""
    milliseconds: int = 0
    """Of a video; 0 if it has no readable header."""
    frame: Frame | None = None
    """Which image of a video is meant; None: all of the file."""

    @property
    def extent(self) -> tuple[int, int]:
        """(height, width) of an image or video, (frames, rate) of a clip; with a 0 if it has no readable header."""
        return (self.frames, self.rate) if self.kind == "audio" else (self.height, self.width)


@dataclass(frozen=True)
class Codes:
    """What the numbers in the rows of a shard mean."""

    extensions: tuple[str, ...]
    kinds: tuple[str, ...]
    """Of each of `extensions`, which may be there once for each kind."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ShardIndex:
    """Read with `key`, `members`, `record` and `bad_reason`; rows are 0 to len - 1 in the shard's order."""

    path: Place
    version: ShardVersion
    codes: Codes
    samples: np.ndarray  # [N + 1] SAMPLE; the last row only ends the one before
    all_members: np.ndarray  # [M] MEMBER
    packed_keys: bytes  # see `pack_keys`
    fields: Fields = NO_FIELDS
    """With others the record and the media are those that `data.fields` names."""
    kept_in: Path | None = None
    """The file of a catalogue that it was read from."""

    def __len__(self) -> int:
        return len(self.samples) - 1

    def key(self, row: int) -> str:
        ends, keys = self._keys
        return keys[ends[row] : ends[row + 1]].decode("utf-8", "surrogateescape")

    def members(self, row: int) -> list[Member]:
        """Members in the order of the tar, but numbered images and clips in the order of their numbers: the n-th
        image belongs to the n-th placeholder."""
        found = self._members(row)
        if self.fields == NO_FIELDS:
            return found
        arranged = self._arranged(found)
        return [found[at]._replace(kind=kind) for at, kind in zip(arranged.order, arranged.kinds, strict=True)]

    def record(self, row: int) -> int | None:
        """Which member holds the JSON or text record; None if the sample has none (then `bad_reason` says so)."""
        at = int(self.samples["record"][row])
        if self.fields != NO_FIELDS:
            at = self._arranged(self._members(row)).record
        return None if at < 0 else at

    def bad_reason(self, row: int) -> str | None:
        """Why the sample is bad, as far as its members show; None if they show nothing."""
        if self.fields != NO_FIELDS:
            return self._arranged(self._members(row)).reason
        code = int(self.samples["reason"][row])
        return self.codes.reasons[code - 1] if code else None

    def unread(self) -> Counter[tuple[str, str]]:
        """How many members of the shard are not read, by (extension, what they are)."""
        found: Counter[tuple[str, str]] = Counter()
        for names, number in self._patterns().items():
            for pair in unread(names, self.fields):
                found[pair] += number
        return found

    def extensions(self) -> Counter[str]:
        """How many members of the shard have an extension."""
        found: Counter[str] = Counter()
        for code, number in enumerate(np.bincount(self.all_members["code"], minlength=len(self.codes.extensions))):
            found[self.codes.extensions[code]] += int(number)
        return found

    @property
    def num_bad(self) -> int:
        """Samples with a `bad_reason`."""
        if self.fields == NO_FIELDS:
            return int(np.count_nonzero(self.samples["reason"][:-1]))
        return sum(
            number for names, number in self._patterns().items() if arrange(names, self.fields).reason is not None
        )

    def fault(self) -> str:
        """Why its rows cannot be those of the shard; empty: they can. A checksum only says that rows are as they were
        written. Its keys are checked when they are read."""
        codes, records, reasons = self.codes, self.samples["record"][:-1], self.samples["reason"][:-1]
        if len(codes.kinds) != len(codes.extensions) or not {*codes.kinds} <= {"image", "video", "audio", "other"}:
            return "codes of unknown kinds"
        firsts = self.samples["first_member"]
        counts = np.diff(firsts)
        if firsts.min() != 0 or firsts[0] or firsts.max() != len(self.all_members) or firsts[-1] != firsts.max():
            return "samples whose members are not in it"
        if len(self) and counts.min() < 0:
            return "samples whose members are not in it"
        if len(self) and (reasons.min() < 0 or reasons.max() > len(codes.reasons)):
            return "samples that are bad for an unknown reason"
        if (records < -1).any() or (records >= counts).any() or ((records < 0) & (reasons == 0)).any():
            return "samples without their record"
        if not len(self.all_members):
            return ""
        members, size = self.all_members, self.version.size
        # Each alone first, since their sum may overflow.
        is_inside = all(0 <= members[name].min() and members[name].max() <= size for name in ("offset", "size"))
        if not is_inside or (members["offset"] + members["size"]).max() > size:
            return "members that are not in the shard"
        if members["first"].min() < 0 or members["second"].min() < 0:
            return "members with negative extents"
        if members["code"].min() < 0 or members["code"].max() >= len(codes.extensions):
            return "members of an unknown kind"
        return ""

    def with_fields(self, fields: Fields) -> ShardIndex:
        """The same samples with the record and the media that `data.fields` names."""
        return self if fields == self.fields else replace(self, fields=fields)

    def _members(self, row: int) -> list[Member]:
        """As they are without `data.fields`."""
        start, end = self.samples["first_member"][row : row + 2].tolist()
        found = []
        for offset, size, first, second, code in self.all_members[start:end].tolist():
            kind = self.codes.kinds[code]
            extension = self.codes.extensions[code]
            own = kind_of(extension)
            if own == "video":
                found.append(Member(extension, offset, size, *video_size(first), 0, 0, kind, second))
                continue
            height, width, frames, rate = (first, second, 0, 0) if own == "image" else (0, 0, first, second)
            found.append(Member(extension, offset, size, height, width, frames, rate, kind))
        return found

    def _arranged(self, members: list[Member]) -> Arrangement:
        return arrange(tuple(member.extension for member in members), self.fields)

    def _patterns(self) -> Counter[tuple[str, ...]]:
        """Samples by the extensions of their members."""
        firsts, codes = self.samples["first_member"].tolist(), self.all_members["code"].astype(np.int32)
        found = Counter(codes[start:end].tobytes() for start, end in zip(firsts[:-1], firsts[1:], strict=True))
        named: Counter[tuple[str, ...]] = Counter()
        for pattern, number in found.items():
            names = [self.codes.extensions[code] for code in np.frombuffer(pattern, dtype=np.int32)]
            named[tuple(names)] += number
        return named

    @cached_property
    def _keys(self) -> tuple[list[int], bytes]:
        unpacking = zlib.decompressobj()
        try:
            # What a file says is bounded: the shard has each of them, in the name of a member.
            most = 0 if self.kept_in is None else 4 * len(self) + self.version.size + 1
            raw = unpacking.decompress(self.packed_keys, most)
        except zlib.error as error:
            raise self._no_keys(str(error)) from error
        lengths = np.frombuffer(raw[: len(raw) // 4 * 4][: 4 * len(self)], dtype="<u4").astype(np.int64)
        if not unpacking.eof or len(lengths) != len(self) or lengths.sum() != len(raw) - 4 * len(self):
            raise self._no_keys("of another length")
        return [0, *np.cumsum(lengths).tolist()], raw[4 * len(self) :]

    def _no_keys(self, why: str) -> DataError:
        return DataError(
            f"{self.kept_in}: the index is damaged where it has the keys of {self.path} ({why}): remove it, and it is "
            "built anew"
        )


def video_size(first: Any) -> tuple[Any, Any]:
    """(height, width) that `MEMBER.first` has of a video, or of many."""
    return first >> 32, first & 0xFFFFFFFF


def pack_keys(keys: list[str]) -> bytes:
    """The keys of a shard in few bytes: their lengths in UTF-8, uint32, and their bytes, compressed."""
    raw = [key.encode("utf-8", "surrogateescape") for key in keys]
    return zlib.compress(np.array([len(one) for one in raw], dtype="<u4").tobytes() + b"".join(raw))


class Rows:
    """Rows of a catalogue, many at once and of any shards.

    Attributes:
        samples: [rows] `SAMPLE`; `first_member` counts from the first of these rows.
        firsts: int64 [rows + 1], the first member of each among `members`.
        members: [members] `MEMBER`; `code` is one of `names`.
        names, kinds: of codes.
    """

    def __init__(
        self,
        files: Sequence[IndexFile],
        of_shards: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        rows: np.ndarray,
    ) -> None:
        """
        Args:
            of_shards: of the shard of each row: its number in `files`, its row in the table there, the first byte of
                its part, its samples.
            rows: int64, in their shards.
        """
        self.names, self.kinds, bases = list[str](), list[str](), dict[tuple[int, int], int]()
        counts, taken = np.zeros(len(rows), dtype=np.int64), []
        file_of, table_rows, first_bytes, samples = of_shards
        for number, file in enumerate(files):
            which = np.flatnonzero(file_of == number)
            if not len(which):
                continue
            words = file.bytes[: len(file.bytes) // 8 * 8].view("<i8")
            starts = first_bytes[which] // 8
            at = starts + rows[which] * (SAMPLE.itemsize // 8)
            first = words[at]
            counts[which] = words[at + SAMPLE.itemsize // 8] - first
            members = starts + (samples[which] + 1) * (SAMPLE.itemsize // 8) + first * (MEMBER.itemsize // 8)
            codes = file.table["codes"][table_rows[which]]
            for code in np.unique(codes).tolist():
                bases[number, code] = len(self.names)
                extensions, kinds, _ = file.codes[code]
                self.names += extensions
                self.kinds += kinds
            base = np.array([bases.get((number, code), 0) for code in range(len(file.codes))], dtype=np.int64)
            taken.append((which, words, words[at + 1], members, base[codes]))
        self.firsts = np.concatenate([[0], np.cumsum(counts)])
        self.samples = np.zeros(len(rows), dtype=SAMPLE)
        member_words = np.empty((int(self.firsts[-1]), MEMBER.itemsize // 8), dtype="<i8")
        added = np.zeros(len(member_words), dtype=np.int32)
        for which, words, reasons, members, base in taken:
            self.samples.view("<i8").reshape(-1, SAMPLE.itemsize // 8)[which, 1] = reasons
            to = _spread(self.firsts[which], counts[which])
            sources = _spread(members, counts[which], MEMBER.itemsize // 8)
            for column in range(member_words.shape[1]):
                member_words[to, column] = words[sources + column]
            added[to] = np.repeat(base, counts[which])
        self.members = member_words.view(MEMBER).reshape(-1)
        self.members["code"] += added


def _spread(starts: np.ndarray, counts: np.ndarray, step: int = 1) -> np.ndarray:
    """start, start + step, ... so many of each, one after the other."""
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + step * within
