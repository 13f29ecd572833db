"""The index of one WebDataset shard: the position of each member of each sample, and the extents of media.

A sample is a run of adjacent members with one key: the path up to the FIRST dot of the base name. The extension is the
rest, in lower case: `a/img.2024.01.jpg` has the key `a/img` and the extension `2024.01.jpg`. Base names that start with
a dot (macOS writes `a/._img.jpg`) or lack an extension, and `__*__`, are skipped, as in WebDataset.
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
"""A sample: its first member, the record among its members (-1: none), and its reason code (0: not bad)."""
MEMBER = np.dtype([("offset", "<i8"), ("size", "<i8"), ("first", "<i8"), ("second", "<i4"), ("code", "<i4")])
"""A member: its bytes, extent (`Member.extent`) and code (`Codes`). For a video, `first` is height times 2^32 plus
width, and `second` its milliseconds."""


class Frame(NamedTuple):
    """One of the frames that are read of a video."""

    number: int
    of: int
    """Number of frames that are read."""


class Member(NamedTuple):
    """One file of a sample. `height`, `width`: pixels, after orientation. `frames`, `rate`: audio samples per channel
    and per second. They are 0 if they do not apply or are unreadable."""

    extension: str
    offset: int
    size: int
    height: int
    width: int
    frames: int
    rate: int
    kind: str
    """The kind: "image", "video", "audio", or "other" (its record, and unread members)."""
    milliseconds: int = 0
    """Length of a video; 0 without a readable header."""
    frame: Frame | None = None
    """The frame of a video; None: the whole file."""

    @property
    def extent(self) -> tuple[int, int]:
        """(height, width) of an image or video, (frames, rate) of audio; with a 0 if unreadable."""
        return (self.frames, self.rate) if self.kind == "audio" else (self.height, self.width)


@dataclass(frozen=True)
class Codes:
    """Meanings of the codes in a shard's rows."""

    extensions: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kind of each of `extensions`, which may repeat with different kinds."""
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard; rows are 0 to len - 1 in shard order."""

    path: Place
    version: ShardVersion
    codes: Codes
    samples: np.ndarray  # [N + 1] SAMPLE; the last row only ends the one before
    all_members: np.ndarray  # [M] MEMBER
    packed_keys: bytes
    fields: Fields = NO_FIELDS
    """`data.fields`, which may name the record and the media."""
    kept_in: Path | None = None
    """The catalogue file that it was read from."""

    def __len__(self) -> int:
        return len(self.samples) - 1

    def key(self, row: int) -> str:
        ends, keys = self._keys
        return keys[ends[row] : ends[row + 1]].decode("utf-8", "surrogateescape")

    def members(self, row: int) -> list[Member]:
        """Return the members in tar order, but numbered media by number, as their placeholders."""
        found = self._members(row)
        if self.fields == NO_FIELDS:
            return found
        arranged = self._arranged(found)
        return [found[at]._replace(kind=kind) for at, kind in zip(arranged.order, arranged.kinds, strict=True)]

    def record(self, row: int) -> int | None:
        """Return the index of the record among the members; None if there is none (see `bad_reason`)."""
        at = int(self.samples["record"][row])
        if self.fields != NO_FIELDS:
            at = self._arranged(self._members(row)).record
        return None if at < 0 else at

    def bad_reason(self, row: int) -> str | None:
        """Return why the members make the sample bad; None if they do not."""
        if self.fields != NO_FIELDS:
            return self._arranged(self._members(row)).reason
        code = int(self.samples["reason"][row])
        return self.codes.reasons[code - 1] if code else None

    def unread(self) -> Counter[tuple[str, str]]:
        """Return the number of unread members by (extension, description)."""
        found: Counter[tuple[str, str]] = Counter()
        for names, number in self._patterns().items():
            for pair in unread(names, self.fields):
                found[pair] += number
        return found

    def extensions(self) -> Counter[str]:
        """Return the number of members by extension."""
        found: Counter[str] = Counter()
        for code, number in enumerate(np.bincount(self.all_members["code"], minlength=len(self.codes.extensions))):
            found[self.codes.extensions[code]] += int(number)
        return found

    @property
    def num_bad(self) -> int:
        """Number of samples with a `bad_reason`."""
        if self.fields == NO_FIELDS:
            return int(np.count_nonzero(self.samples["reason"][:-1]))
        return sum(
            number for names, number in self._patterns().items() if arrange(names, self.fields).reason is not None
        )

    def fault(self) -> str:
        """Return why the rows, except keys, cannot belong to the shard; "" if they can."""
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
        # Separately first, since their sum may overflow.
        is_inside = all(0 <= members[name].min() and members[name].max() <= size for name in ("offset", "size"))
        if not is_inside or (members["offset"] + members["size"]).max() > size:
            return "members that are not in the shard"
        if members["first"].min() < 0 or members["second"].min() < 0:
            return "members with negative extents"
        if members["code"].min() < 0 or members["code"].max() >= len(codes.extensions):
            return "members of an unknown kind"
        return ""

    def with_fields(self, fields: Fields) -> ShardIndex:
        """Return the same samples with other `data.fields`."""
        return self if fields == self.fields else replace(self, fields=fields)

    def _members(self, row: int) -> list[Member]:
        """Return the members as without `data.fields`."""
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
            # Bound the decompression: all keys are in the shard's member names.
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
    """Return (height, width) from `MEMBER.first` of a video, or of many."""
    return first >> 32, first & 0xFFFFFFFF


def pack_keys(keys: list[str]) -> bytes:
    """Compress the keys of a shard: their UTF-8 lengths, uint32, and their bytes."""
    raw = [key.encode("utf-8", "surrogateescape") for key in keys]
    return zlib.compress(np.array([len(one) for one in raw], dtype="<u4").tobytes() + b"".join(raw))


class Rows:
    """Rows of a catalogue, many at once, of any shards.

    Attributes:
        samples: [rows] `SAMPLE`; `first_member` is relative to these rows.
        firsts: int64 [rows + 1], first of each sample's `members`.
        members: [members] `MEMBER`; `code` indexes `names`.
        names, kinds: extension and kind of each code.
    """

    def __init__(
        self,
        files: Sequence[IndexFile],
        of_shards: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        rows: np.ndarray,
    ) -> None:
        """Gather the rows.

        Args:
            of_shards: arrays over rows: file index, row in its table, first byte of the part, samples of the shard.
            rows: int64, row in the shard.
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
    """Return start, start + step, ..., `counts` numbers for each start, concatenated."""
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + step * within
