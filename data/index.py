"""Index of one WebDataset shard: where each member of each sample lies, and how large its pictures are.

A sample is a run of neighbouring tar members with one key. The key rule is WebDataset's: the key is the member's path
up to the FIRST dot of its base name, the extension is everything after it, in lower case. So `a/img.2024.01.jpg` has
the key `a/img` and the extension `2024.01.jpg`; names such as `img.2024.01` and `img.2024.02` share one key, and are
one sample when they are neighbours. Members that start with a dot, have no extension, or are named `__*__` are
skipped. What a member is (picture, clip, record, nothing that is read) follows from its extension and those of the
others (`data.members`).

The file `<shard>.mimo-index` is one JSON line (padded) and three arrays, with a checksum over all; it is mapped into
memory. It is compared with the shard (see `data.storage.version`) and built again when they differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128

from data.errors import DataError, ShardError
from data.fields import NO_FIELDS, Fields
from data.media.audio_headers import parse_audio_header
from data.media.headers import parse_header
from data.members import arrange, kind_of, unread
from data.reading import READS
from data.shards import refuse_compressed
from data.storage.remote import WholeObject
from data.storage.replace import replacing
from data.storage.retry import RETRIES, retrying
from data.storage.tar import ReadRange, walk_tar
from data.storage.url import Place, Url, place_of
from data.storage.version import ShardVersion, open_file, require_file

_log = logging.getLogger(__name__)

_VERSION = 5
_SUFFIX = ".mimo-index"
_LONGEST_HEAD = 1 << 26  # bytes of the JSON line
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_SAMPLE = np.dtype([("first_member", "<i8"), ("key_at", "<i8"), ("reason", "<i4"), ("record", "<i4")])
_MEMBER = np.dtype(
    [("offset", "<i8"), ("size", "<i8"), ("frames", "<i8"), ("rate", "<i4")]
    + [("height", "<i4"), ("width", "<i4"), ("extension", "<i4")]
)


class Member(NamedTuple):
    """One file of a sample. `height`, `width`: pixels, after EXIF orientation; 0 if not a picture or unreadable.
    `frames`, `rate`: audio samples per channel and their number per second; 0 if not audio or unreadable."""

    extension: str
    offset: int
    size: int
    height: int
    width: int
    frames: int
    rate: int
    kind: str
    """"image", "audio", or "other": its record, and what is not read."""

    @property
    def extent(self) -> tuple[int, int]:
        """(height, width) of a picture, (frames, rate) of a clip; with a 0 if it has no readable header."""
        return (self.height, self.width) if self.kind == "image" else (self.frames, self.rate)


@dataclass(frozen=True)
class ShardIndex:
    """Read with `key`, `members`, `record` and `bad_reason`; rows are 0 to len - 1 in the shard's order."""

    path: Place
    version: ShardVersion
    extensions: list[str]
    kinds: list[str]  # of each of `extensions`, which may be there once for each kind
    reasons: list[str]
    samples: np.ndarray  # [N + 1] _SAMPLE; the last row only ends the one before
    all_members: np.ndarray  # [M] _MEMBER
    keys: np.ndarray  # uint8: the keys, UTF-8, end to end

    def __len__(self) -> int:
        return len(self.samples) - 1

    def key(self, row: int) -> str:
        start, end = int(self.samples["key_at"][row]), int(self.samples["key_at"][row + 1])
        return self.keys[start:end].tobytes().decode("utf-8", "surrogateescape")

    def members(self, row: int) -> list[Member]:
        """Members in the order of the tar, but numbered pictures and clips in the order of their numbers: the n-th
        picture belongs to the n-th placeholder."""
        start, end = int(self.samples["first_member"][row]), int(self.samples["first_member"][row + 1])
        return [
            Member(self.extensions[extension], offset, size, height, width, frames, rate, self.kinds[extension])
            for offset, size, frames, rate, height, width, extension in self.all_members[start:end].tolist()
        ]

    def record(self, row: int) -> int | None:
        """Which member holds the JSON or text record; None if the sample has none (then `bad_reason` says so)."""
        at = int(self.samples["record"][row])
        return None if at < 0 else at

    def bad_reason(self, row: int) -> str | None:
        """Why the sample is bad, as far as its members show; None if they show nothing."""
        code = int(self.samples["reason"][row])
        return self.reasons[code - 1] if code else None

    def unread(self, fields: Fields = NO_FIELDS) -> Counter[tuple[str, str]]:
        """How many members of the shard are not read, by (extension, what they are)."""
        firsts, codes = self.samples["first_member"].tolist(), self.all_members["extension"].astype(np.int32)
        patterns = Counter(codes[start:end].tobytes() for start, end in zip(firsts[:-1], firsts[1:], strict=True))
        found: Counter[tuple[str, str]] = Counter()
        for pattern, number in patterns.items():
            for pair in unread([self.extensions[code] for code in np.frombuffer(pattern, dtype=np.int32)], fields):
                found[pair] += number
        return found

    def with_fields(self, fields: Fields) -> ShardIndex:
        """The same samples with the record and the media that `data.fields` names."""
        if fields == NO_FIELDS:
            return self
        codes, reasons = _Codes(), _Codes()
        samples, members = self.samples.copy(), self.all_members.copy()
        firsts = samples["first_member"].tolist()
        own = [self.extensions[code] for code in members["extension"].tolist()]
        for row, (start, end) in enumerate(zip(firsts[:-1], firsts[1:], strict=True)):
            found = arrange(tuple(own[start:end]), fields)
            members[start:end] = members[start:end][list(found.order)]
            names = [own[start + place] for place in found.order]
            members["extension"][start:end] = [codes.of(pair) for pair in zip(names, found.kinds, strict=True)]
            samples["record"][row] = found.record
            samples["reason"][row] = reasons.of(found.reason) + 1 if found.reason else 0
        return replace(
            self,
            samples=samples,
            all_members=members,
            reasons=list(reasons.known),
            extensions=[name for name, _ in codes.known],
            kinds=[kind for _, kind in codes.known],
        )

    @property
    def num_bad(self) -> int:
        """Samples with a `bad_reason`."""
        return int(np.count_nonzero(self.samples["reason"][:-1]))


def open_index(
    shard: str | os.PathLike[str] | Url, cache_dir: str | os.PathLike[str] | None = None, retries: int = RETRIES
) -> ShardIndex:
    """The shard's index; built and saved first if it is absent or out of date. Several processes may call this at once.

    Args:
        retries: `data.read_retries`: times that a read is tried again after an I/O error.

    Raises ShardError if the shard is no file, compressed, truncated or damaged; ReadError if it cannot be read;
    DataError if the index cannot be written.
    """
    shard = place_of(shard)
    if isinstance(shard, Url):
        return _open_remote(shard, cache_dir, retries)
    found = retrying(shard.stat, f"{shard}: cannot look at it", retries)
    require_file(shard, found)
    writable = index_path(shard, cache_dir, writable=True)
    for path in dict.fromkeys([index_path(shard, cache_dir), writable]):
        index = _load(path, shard)
        if index is None or index.version.dated(found):
            continue
        if index.version.ctime_ns == found.st_ctime_ns:
            return index
        version = retrying(partial(_confirmed, shard, index), f"{shard}: cannot read it", retries)
        if version is not None:
            index = replace(index, version=version)
            try:
                _save(index, writable)
            except DataError:
                pass  # then the next start compares again
            return index
    index = build_index(shard, retries)
    _save(index, writable)
    return index


def _open_remote(shard: Url, cache_dir: str | os.PathLike[str] | None, retries: int) -> ShardIndex:
    source, path = WholeObject(shard, retries), index_path(shard, cache_dir)
    index = _load(path, shard)
    if index is None or not source.is_same(index.version):
        index = _build_remote(shard, source)
        _save(index, path)
    return index


def _build_remote(shard: Url, source: WholeObject) -> ShardIndex:
    refuse_compressed(str(shard))
    return _build(shard, source.look(), source.read)


def _confirmed(shard: Path, index: ShardIndex) -> ShardVersion | None:
    fd = open_file(shard)
    try:
        return index.version.confirmed(fd, os.fstat(fd))
    finally:
        os.close(fd)


def index_path(
    shard: str | os.PathLike[str] | Url,
    cache_dir: str | os.PathLike[str] | None = None,
    writable: bool = False,
    suffix: str = _SUFFIX,
) -> Path:
    """Where the index lies, or another file about the shard: beside it, or in `cache_dir` if given. With `writable`, a
    user-wide cache folder takes the place of a shard folder that this process may not write to; so it does of a
    URL's."""
    shard = place_of(shard)
    if cache_dir is None and (isinstance(shard, Url) or (writable and not os.access(shard.parent, os.W_OK))):
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-train" / "index"
    if cache_dir is None:
        assert not isinstance(shard, Url)
        return shard.with_name(shard.name + suffix)
    # Shards of several folders often share their names; the hash keeps their indexes apart.
    place = hashlib.sha256(os.fsencode(str(shard.absolute()))).hexdigest()[:12]
    return Path(cache_dir).expanduser() / f"{shard.name}.{place}{suffix}"


def build_index(shard: str | os.PathLike[str] | Url, retries: int = RETRIES) -> ShardIndex:
    """Reads the shard's directory and picture headers; writes nothing. Raises ShardError and ReadError as `open_index`
    does."""
    shard = place_of(shard)
    if isinstance(shard, Url):
        return _build_remote(shard, WholeObject(shard, retries))
    refuse_compressed(shard)
    fd = retrying(lambda: open_file(shard), f"{shard}: cannot open it", retries)

    def read(length: int, offset: int) -> bytes:
        what = f"{shard}: cannot read {length} bytes at byte {offset}"
        return retrying(lambda: os.pread(fd, length, offset), what, retries)

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


def _build(shard: Place, version: ShardVersion, read: ReadRange) -> ShardIndex:
    codes, reasons = _Codes(), _Codes()
    samples: list[tuple[int, int, int, int]] = []
    members: list[tuple[int, ...]] = []
    keys = bytearray()
    current: tuple[str, list[str], list[tuple[int, ...]]] | None = None

    def close_sample() -> None:
        if current is None:
            return
        key, names, places = current
        found = arrange(tuple(names))
        reason = reasons.of(found.reason) + 1 if found.reason else 0
        samples.append((len(members), len(keys), reason, found.record))
        for place, kind in zip(found.order, found.kinds, strict=True):
            members.append((*places[place], codes.of((names[place], kind))))
        keys.extend(key.encode("utf-8", "surrogateescape"))

    with READS.of(shard):
        for name, offset, size in walk_tar(shard, read, version.size):
            READS.count += 1
            split = _NAME.match(name)
            if split is None or _META.search(name):
                continue
            key, extension = split[1], split[2].lower()
            if current is None or current[0] != key:
                close_sample()
                current = (key, [], [])
            current[1].append(extension)
            current[2].append((offset, size, *_measure(read, extension, offset, size)))
        close_sample()
    return ShardIndex(
        path=shard,
        version=version,
        extensions=[extension for extension, _ in codes.known],
        kinds=[kind for _, kind in codes.known],
        reasons=list(reasons.known),
        samples=np.array([*samples, (len(members), len(keys), 0, -1)], dtype=_SAMPLE),
        all_members=np.array(members, dtype=_MEMBER),
        keys=np.frombuffer(bytes(keys), dtype=np.uint8),
    )


def _measure(read: ReadRange, extension: str, offset: int, size: int) -> tuple[int, int, int, int]:
    """(frames, rate, height, width) of a member; zeros where they do not apply or cannot be read."""
    kind = kind_of(extension)
    if kind == "image":
        header = parse_header(lambda at, length: read(max(min(length, size - at), 0), offset + at), size)
        return (0, 0, header.height, header.width) if header else (0, 0, 0, 0)
    if kind == "audio":
        frames, rate = parse_audio_header(read(size, offset)) or (0, 0)
        return (frames, rate, 0, 0) if frames < 1 << 63 and rate < 1 << 31 else (0, 0, 0, 0)
    return 0, 0, 0, 0


def _save(index: ShardIndex, path: Path) -> None:
    arrays = [array.tobytes() for array in (index.samples, index.all_members, index.keys)]
    meta: dict[str, Any] = {"version": _VERSION, "shard": asdict(index.version)}
    meta |= {"samples": len(index), "members": len(index.all_members), "key_bytes": len(index.keys)}
    meta |= {"extensions": index.extensions, "kinds": index.kinds, "reasons": index.reasons}
    head = json.dumps(meta | {"checksum": _checksum(meta, arrays)}).encode()
    head += b" " * (-(len(head) + 1) % 64) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads the shards may read their indexes, whatever the umask of the user who made them.
        with replacing(path, mode=0o644) as file:
            file.write(head)
            for array in arrays:
                file.write(array)
    except OSError as error:
        raise DataError(
            f"cannot write the index {path} ({error.strerror}): set data.cache_dir to a folder that can be written"
        ) from error


def _checksum(meta: dict[str, Any], arrays: Iterable[Any]) -> str:
    digest = xxh3_128(json.dumps(meta, sort_keys=True).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def _load(path: Path, shard: Place) -> ShardIndex | None:
    """The saved index, or None if it is absent, of another version, or damaged."""
    try:
        with open(open_file(path), "rb") as file:
            head = file.readline(_LONGEST_HEAD)
            meta = json.loads(head)
            if meta["version"] != _VERSION:
                return None
            lengths = [(meta["samples"] + 1) * _SAMPLE.itemsize, meta["members"] * _MEMBER.itemsize, meta["key_bytes"]]
            bounds = [sum(lengths[:at], len(head)) for at in range(4)]
            if os.fstat(file.fileno()).st_size != bounds[-1]:
                raise DataError("it has another length")
            # One mapping for all arrays: each mapping holds a file descriptor. It is of the file that was just checked,
            # also if another process has replaced it meanwhile.
            blob = np.memmap(file, dtype=np.uint8, mode="r")
            if meta.pop("checksum") != _checksum(meta, [blob[len(head) :]]):
                raise DataError("its checksum is wrong")
            version = ShardVersion(**meta["shard"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s: the index is damaged or cannot be read, and built again: %s", path, error)
        return None
    return ShardIndex(
        path=shard,
        version=version,
        extensions=meta["extensions"],
        kinds=meta["kinds"],
        reasons=meta["reasons"],
        samples=blob[bounds[0] : bounds[1]].view(_SAMPLE),
        all_members=blob[bounds[1] : bounds[2]].view(_MEMBER),
        keys=blob[bounds[2] : bounds[3]],
    )
