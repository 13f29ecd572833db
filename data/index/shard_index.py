"""The index of one WebDataset shard: the position of each member of each sample, and the extents of media.

A sample is a run of adjacent members with one key: the path up to the FIRST dot of the base name. The extension is the
rest, in lower case: `a/img.2024.01.jpg` has the key `a/img` and the extension `2024.01.jpg`. Base names that start with
a dot (macOS writes `a/._img.jpg`) or lack an extension, and `__*__`, are skipped, as in WebDataset.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from data.media.video_packets import milliseconds_of
from data.records.members import NO_FIELDS, Arrangement, Fields, arrange, kind_of, unread
from data.storage.files import ShardVersion
from data.storage.url import Place

SAMPLE = np.dtype([("first_member", "<i8"), ("record", "<i4"), ("reason", "<i4")])
"""A sample: its first member, the record among its members (-1: none), and its reason code (0: not bad)."""
MEMBER = np.dtype(
    [("offset", "<i8"), ("size", "<i8"), ("first", "<i8"), ("second", "<i8"), ("sound", "<i4"), ("code", "<i4")]
)
"""A member: its bytes, extent (`Member.extent`), `Member.sound`, and code (`Codes`). The extent of a video is
`pack_video`."""


class Frame(NamedTuple):
    """One of the frames that are read of a video."""

    number: int
    of: int
    """Number of frames that are read."""


class Member(NamedTuple):
    """One file of a sample. `height`, `width`: pixels, after orientation. `frames`: samples per channel of audio, or
    frames of a video, of which `rate` / `rate_base` are in a second. 0 if they do not apply or are unreadable."""

    extension: str
    offset: int
    size: int
    height: int
    width: int
    frames: int
    rate: int
    kind: str
    """The kind: "image", "video", "audio", or "other" (its record, and unread members)."""
    rate_base: int = 1
    """Seconds in which there are `rate` frames; 1 for audio."""
    sound: int = 0
    """Milliseconds of the first sound track of a video, rounded up; 0 without one."""
    frame: Frame | None = None
    """The frame of a video; None: the whole file."""

    @property
    def milliseconds(self) -> int:
        """Length of a video or audio file; 0 without a readable header."""
        return int(milliseconds_of(self.frames, self.rate, self.rate_base))

    @property
    def as_sound(self) -> Member:
        """The sound of a video as an audio item."""
        return self._replace(kind="audio", frames=self.sound, rate=1000, rate_base=1)

    @property
    def is_sound(self) -> bool:
        """True if it is `as_sound` of a video."""
        return self.kind == "audio" and self.sound > 0

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

    def __len__(self) -> int:
        return len(self.samples) - 1

    def key(self, row: int) -> str:
        ends, keys = self._keys
        return keys[ends[row] : ends[row + 1]].decode("utf-8", "surrogateescape")

    def members(self, row: int) -> list[Member]:
        """Return the members in tar order, but numbered media by number, as their placeholders."""
        members = self._members(row)
        if self.fields == NO_FIELDS:
            return members
        arranged = self._arranged(members)
        return [members[at]._replace(kind=kind) for at, kind in zip(arranged.order, arranged.kinds, strict=True)]

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
        counts: Counter[tuple[str, str]] = Counter()
        for names, number in self._patterns().items():
            for pair in unread(names, self.fields):
                counts[pair] += number
        return counts

    def extensions(self) -> Counter[str]:
        """Return the number of members by extension."""
        counts: Counter[str] = Counter()
        for code, number in enumerate(np.bincount(self.all_members["code"], minlength=len(self.codes.extensions))):
            counts[self.codes.extensions[code]] += int(number)
        return counts

    @property
    def num_bad(self) -> int:
        """Number of samples with a `bad_reason`."""
        if self.fields == NO_FIELDS:
            return int(np.count_nonzero(self.samples["reason"][:-1]))
        return sum(
            number for names, number in self._patterns().items() if arrange(names, self.fields).reason is not None
        )

    def with_fields(self, fields: Fields) -> ShardIndex:
        """Return the same samples with other `data.fields`."""
        return self if fields == self.fields else replace(self, fields=fields)

    def _members(self, row: int) -> list[Member]:
        """Return the members as without `data.fields`."""
        start, end = self.samples["first_member"][row : row + 2].tolist()
        members = []
        for offset, size, first, second, sound, code in self.all_members[start:end].tolist():
            kind = self.codes.kinds[code]
            extension = self.codes.extensions[code]
            kind_now = kind_of(extension)
            if kind_now == "video":
                height, width, frames, rate, rate_base = unpack_video(first, second)
                members.append(Member(extension, offset, size, height, width, frames, rate, kind, rate_base, sound))
                continue
            height, width, frames, rate = (first, second, 0, 0) if kind_now == "image" else (0, 0, first, second)
            members.append(Member(extension, offset, size, height, width, frames, rate, kind))
        return members

    def _arranged(self, members: list[Member]) -> Arrangement:
        return arrange(tuple(member.extension for member in members), self.fields)

    def _patterns(self) -> Counter[tuple[str, ...]]:
        firsts, codes = self.samples["first_member"].tolist(), self.all_members["code"].astype(np.int32)
        patterns = Counter(codes[start:end].tobytes() for start, end in zip(firsts[:-1], firsts[1:], strict=True))
        named: Counter[tuple[str, ...]] = Counter()
        for pattern, number in patterns.items():
            names = [self.codes.extensions[code] for code in np.frombuffer(pattern, dtype=np.int32)]
            named[tuple(names)] += number
        return named

    @cached_property
    def _keys(self) -> tuple[list[int], bytes]:
        """(ends of the keys, all keys)."""
        raw = zlib.decompress(self.packed_keys)
        lengths = np.frombuffer(raw[: 4 * len(self)], dtype="<u4").astype(np.int64)
        return [0, *np.cumsum(lengths).tolist()], raw[4 * len(self) :]


def pack_video(height: int, width: int, frames: int, numerator: int, denominator: int) -> tuple[int, int]:
    """Return (`first`, `second`) of `MEMBER` for a video of `numerator` / `denominator` frames per second."""
    return frames << 32 | height << 16 | width, numerator << 32 | denominator


def unpack_video(first: Any, second: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the arguments of `pack_video` from its results, integers or int64 arrays."""
    return first >> 16 & 0xFFFF, first & 0xFFFF, first >> 32, second >> 32, second & 0xFFFFFFFF


def pack_keys(keys: list[str]) -> bytes:
    """Compress the keys of a shard: their UTF-8 lengths, uint32, and their bytes."""
    raw = [key.encode("utf-8", "surrogateescape") for key in keys]
    return zlib.compress(np.array([len(encoded) for encoded in raw], dtype="<u4").tobytes() + b"".join(raw))


@dataclass(frozen=True)
class Rows:
    """Rows of a catalogue, of any shards.

    Attributes:
        samples: [rows] `SAMPLE`.
        firsts: int64 [rows + 1], first of each sample's `members`.
        members: [members] `MEMBER`; `code` indexes `names`.
        names, kinds: extension and kind of each code.
    """

    samples: np.ndarray
    firsts: np.ndarray
    members: np.ndarray
    names: list[str]
    kinds: list[str]
