"""Index of one WebDataset shard: where each member of each sample lies, and how large its pictures are.

A sample is a run of neighbouring tar members with one key. The key rule is WebDataset's: the key is the member's path
up to the FIRST dot of its base name, the extension is everything after it, in lower case. So `a/img.2024.01.jpg` has
the key `a/img` and the extension `2024.01.jpg`; names such as `img.2024.01` and `img.2024.02` share one key, and are
one sample when they are neighbours. Members whose base name starts with a dot (macOS writes `a/._img.jpg`) or has no
extension, and those named `__*__`, are skipped. What a member is (picture, clip, record, nothing that is read) follows
from its extension and those of the others (`data.members`).

An index is built here from its shard; the indexes of many are kept in one file (`data.catalogue`).
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import DataError, MissingLibrary, ShardError
from data.index.shard_names import refuse_compressed
from data.media.headers import parse_audio_header, parse_header, parse_video_header
from data.records.members import NO_FIELDS, Arrangement, Fields, arrange, kind_of, unread
from data.storage.files import READS, RETRIES, ShardVersion, open_file, pread_all, retrying
from data.storage.reader import WholeObject
from data.storage.tar import ReadRange, walk_tar
from data.storage.url import Place, Url, place_of

_NAME = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
SAMPLE = np.dtype([("first_member", "<i8"), ("record", "<i4"), ("reason", "<i4")])
"""A sample: the first of its members, which of these is the record (-1: none), and, from 1 on, why it is bad."""
MEMBER = np.dtype([("offset", "<i8"), ("size", "<i8"), ("first", "<i8"), ("second", "<i4"), ("code", "<i4")])
"""A member: its bytes, its extent (`Member.extent`), and what it is (`Codes`). Of a video `first` is its height times
2^32 and its width, and `second` its milliseconds."""


class Frame(NamedTuple):
    """One of the pictures that are read of a video."""

    number: int
    of: int
    """How many are read."""


class Member(NamedTuple):
    """One file of a sample. `height`, `width`: pixels, after orientation; 0 if not a picture or video, or unreadable.
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
    """Which picture of a video is meant; None: all of the file."""

    @property
    def extent(self) -> tuple[int, int]:
        """(height, width) of a picture or video, (frames, rate) of a clip; with a 0 if it has no readable header."""
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
        """Members in the order of the tar, but numbered pictures and clips in the order of their numbers: the n-th
        picture belongs to the n-th placeholder."""
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


def build_remote(shard: Url, source: WholeObject) -> ShardIndex:
    """The index of an object that is being looked at. Raises ShardError and ReadError as `build_index` does."""
    refuse_compressed(str(shard))
    return _build(shard, source.version(), source.read)


def build_index(shard: str | os.PathLike[str] | Url, retries: int = RETRIES) -> ShardIndex:
    """Reads the shard's directory and picture headers; writes nothing.

    Args:
        retries: `data.read_retries`: times that a read is tried again after an I/O error.

    Raises:
        ShardError: the shard is no file, compressed, truncated or damaged, or changes meanwhile.
        ReadError: it cannot be read.
    """
    shard = place_of(shard)
    if isinstance(shard, Url):
        return build_remote(shard, WholeObject(shard, retries))
    refuse_compressed(shard)
    fd = retrying(lambda: open_file(shard), f"{shard}: cannot open it", retries)

    def read(length: int, offset: int) -> bytes:
        what = f"{shard}: cannot read {length} bytes at byte {offset}"
        return retrying(lambda: pread_all(fd, length, offset), what, retries)

    try:
        before = retrying(lambda: ShardVersion.of(fd), f"{shard}: cannot read it", retries)
        index = _build(shard, before, read)
        if os.fstat(fd).st_mtime_ns != before.mtime_ns or os.fstat(fd).st_size != before.size:
            raise ShardError(f"{shard}: the shard changed while it was indexed. Start again when it is whole.")
        return index
    finally:
        os.close(fd)


class _Codes:
    """Numbers for what is found, from 0 on in its order."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of(self, found: Any) -> int:
        return self.known.setdefault(found, len(self.known))


class IndexBuilder:
    """An index in the making: samples are added in the order of their shard."""

    def __init__(self) -> None:
        self._codes, self._reasons = _Codes(), _Codes()
        self._samples: list[tuple[int, int, int]] = []
        self._members: list[tuple[int, ...]] = []
        self._keys: list[str] = []

    def add(self, key: str, names: Sequence[str], places: Sequence[tuple[int, int, int, int]]) -> None:
        """A sample.

        Args:
            names: extensions of its members; places: (offset, size, and both numbers of the extent) of each.
        """
        found = arrange(tuple(names))
        reason = self._reasons.of(found.reason) + 1 if found.reason else 0
        self._samples.append((len(self._members), found.record, reason))
        for place, kind in zip(found.order, found.kinds, strict=True):
            self._members.append((*places[place], self._codes.of((names[place], kind))))
        self._keys.append(key)

    def index(self, path: Place, version: ShardVersion) -> ShardIndex:
        """That of all samples so far."""
        return ShardIndex(
            path=path,
            version=version,
            codes=Codes(
                tuple(extension for extension, _ in self._codes.known),
                tuple(kind for _, kind in self._codes.known),
                (*self._reasons.known,),
            ),
            samples=np.array([*self._samples, (len(self._members), -1, 0)], dtype=SAMPLE),
            all_members=np.array(self._members, dtype=MEMBER),
            packed_keys=pack_keys(self._keys),
        )


def grouped[Taken](
    walk: Iterable[tuple[str, int, int]], take: Callable[[str, str, int, int], Taken]
) -> Iterator[tuple[str, list[str], list[Taken]]]:
    """(key, extensions, what was taken of each member) of every sample of a tar.

    Args:
        walk: `walk_tar`; take: (key, extension, offset, size) of a member -> what is kept of it; called for each before
            the walk goes on.
    """
    current: tuple[str, list[str], list[Taken]] | None = None
    for name, offset, size in walk:
        READS.count += 1
        split = _NAME.match(name)
        if split is None or _META.search(name):
            continue
        key, extension = split[1], split[2].lower()
        if current is None or current[0] != key:
            if current is not None:
                yield current
            current = (key, [], [])
        current[1].append(extension)
        current[2].append(take(key, extension, offset, size))
    if current is not None:
        yield current


def _build(shard: Place, version: ShardVersion, read: ReadRange) -> ShardIndex:
    builder = IndexBuilder()

    def take(key: str, extension: str, offset: int, size: int) -> tuple[int, int, int, int]:
        return (offset, size, *measure(read, extension, offset, size))

    with READS.of(shard):
        try:
            for sample in grouped(walk_tar(shard, read, version.size), take):
                builder.add(*sample)
        except MissingLibrary as error:
            raise MissingLibrary(f"{shard}: {error}") from error
    return builder.index(shard, version)


def measure(read: ReadRange, extension: str, offset: int, size: int) -> tuple[int, int]:
    """What `MEMBER` has of its extent; zeros where it has none or cannot be read."""
    kind = kind_of(extension)

    def read_at(at: int, length: int) -> bytes:
        return read(max(min(length, size - at), 0), offset + at)

    if kind == "image":
        header = parse_header(read_at, size)
        return (header.height, header.width) if header else (0, 0)
    if kind == "video":
        video = parse_video_header(read_at, size)
        return (video.height << 32 | video.width, video.milliseconds) if video else (0, 0)
    if kind == "audio":
        frames, rate = parse_audio_header(read(size, offset)) or (0, 0)
        return (frames, rate) if frames < 1 << 63 and rate < 1 << 31 else (0, 0)
    return 0, 0
