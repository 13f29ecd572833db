"""Index of one WebDataset shard: where each member of each sample lies, and how large its pictures are.

A sample is a run of neighbouring tar members with one key. The key rule is WebDataset's: the key is the member's path
up to the FIRST dot of its base name, the extension is everything after it, in lower case. So `a/img.2024.01.jpg` has
the key `a/img` and the extension `2024.01.jpg`; names such as `img.2024.01` and `img.2024.02` share one key, and are
one sample when they are neighbours. Members that start with a dot, have no extension, or are named `__*__` are
skipped. What a member is (picture, audio, JSON record, text record) follows from the last part of its extension.

The file `<shard>.mimo-index` is one JSON line (padded) and three arrays; it is mapped into memory, not read. It is
checked against the shard's size and modification time and rebuilt when they differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.media.headers import parse_audio_header, parse_header
from data.reading import READS
from data.shards import refuse_compressed
from data.storage.replace import replacing
from data.storage.tar import walk_tar

IMAGES = frozenset(["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp"])
AUDIO = frozenset(["wav", "flac", "mp3", "ogg", "oga", "opus", "aif", "aiff"])
UNREADABLE = {
    "image": frozenset(["tif", "tiff", "heic", "heif", "avif", "jp2", "jxl", "svg"]),
    "audio": frozenset(["m4a", "aac", "wma"]),
}
"""Pictures and clips that are not decoded: a sample with one is bad, where to overlook it would change its meaning."""

_VERSION = 3
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

    @property
    def kind(self) -> str:
        """ "image", "audio" or "other"."""
        return _kind(self.extension)

    @property
    def extent(self) -> tuple[int, int]:
        """(height, width) of a picture, (frames, rate) of a clip; with a 0 if it has no readable header."""
        return (self.height, self.width) if self.kind == "image" else (self.frames, self.rate)


@dataclass(frozen=True)
class ShardIndex:
    """Read with `key`, `members`, `record` and `bad_reason`; rows are 0 to len - 1 in the shard's order."""

    path: Path
    size: int
    mtime_ns: int
    extensions: list[str]
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
        """Members in the order of the tar: the n-th picture belongs to the n-th placeholder."""
        start, end = int(self.samples["first_member"][row]), int(self.samples["first_member"][row + 1])
        return [
            Member(self.extensions[extension], offset, size, height, width, frames, rate)
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

    @property
    def num_bad(self) -> int:
        """Samples with a `bad_reason`."""
        return int(np.count_nonzero(self.samples["reason"][:-1]))


def open_index(shard: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> ShardIndex:
    """The shard's index; built and saved first if it is absent or out of date. Several processes may call this at once.

    Raises ShardError if the shard is compressed, truncated or damaged; FileNotFoundError if it is absent; DataError if
    the index cannot be written.
    """
    shard = Path(shard)
    stat = os.stat(shard)
    for path in dict.fromkeys([index_path(shard, cache_dir), index_path(shard, cache_dir, writable=True)]):
        index = _load(path, shard, stat.st_size, stat.st_mtime_ns)
        if index is not None:
            return index
    index = build_index(shard)
    _save(index, index_path(shard, cache_dir, writable=True))
    return index


def index_path(
    shard: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, writable: bool = False
) -> Path:
    """Where the index lies: beside the shard, or in `cache_dir` if given. With `writable`, a user-wide cache folder
    takes the place of a shard folder that this process may not write to."""
    shard = Path(shard)
    if cache_dir is None and writable and not os.access(shard.parent, os.W_OK):
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-train" / "index"
    if cache_dir is None:
        return shard.with_name(shard.name + ".mimo-index")
    # Shards of several folders often share their names; the hash keeps their indexes apart.
    place = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:12]
    return Path(cache_dir).expanduser() / f"{shard.name}.{place}.mimo-index"


def build_index(shard: str | os.PathLike[str]) -> ShardIndex:
    """Reads the shard's directory and picture headers; writes nothing. Raises ShardError as `open_index` does."""
    shard = Path(shard)
    refuse_compressed(shard)
    extensions: dict[str, int] = {}
    reasons: dict[str, int] = {}
    samples: list[tuple[int, int, int, int]] = []
    members: list[tuple[int, ...]] = []
    keys = bytearray()
    current: tuple[str, list[str]] | None = None

    def close_sample() -> None:
        if current is None:
            return
        key, names = current
        record, reason = _find_record(names)
        code = reasons.setdefault(reason, len(reasons) + 1) if reason else 0
        samples.append((len(members) - len(names), len(keys), code, record))
        keys.extend(key.encode("utf-8", "surrogateescape"))

    with READS.of(shard), open(shard, "rb") as file:
        stat = os.fstat(file.fileno())
        for name, offset, size in walk_tar(shard, file, stat.st_size):
            READS.count += 1
            split = _NAME.match(name)
            if split is None or _META.search(name):
                continue
            key, extension = split[1], split[2].lower()
            if current is None or current[0] != key:
                close_sample()
                current = (key, [])
            current[1].append(extension)
            code = extensions.setdefault(extension, len(extensions))
            members.append((offset, size, *_measure(file.fileno(), extension, offset, size), code))
        close_sample()
    return ShardIndex(
        path=shard,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        extensions=list(extensions),
        reasons=list(reasons),
        samples=np.array([*samples, (len(members), len(keys), 0, -1)], dtype=_SAMPLE),
        all_members=np.array(members, dtype=_MEMBER),
        keys=np.frombuffer(bytes(keys), dtype=np.uint8),
    )


def _find_record(names: list[str]) -> tuple[int, str | None]:
    """(which member is the record or -1, why there is none). `json` comes before `txt`; `*.json` and `*.txt` do when
    alone."""
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        return -1, f"the extension .{repeated[0]} occurs {names.count(repeated[0])} times under one key"
    for last in ("json", "txt"):
        if last in names:
            return names.index(last), None
        found = [at for at, name in enumerate(names) if name.rpartition(".")[2] == last]
        if len(found) > 1:
            return -1, (
                f"{len(found)} records (.{names[found[0]]}, .{names[found[1]]}) under one key: a key ends at the "
                "first dot of the name, so names of different samples must differ before it"
            )
        if found:
            return found[0], None
    return -1, f"no .json and no .txt member (members: {', '.join('.' + name for name in names)})"


def _kind(extension: str) -> str:
    last = extension.rpartition(".")[2]
    for kind, known in (("image", IMAGES), ("audio", AUDIO)):
        if last in known or last in UNREADABLE[kind]:
            return kind
    return "other"


def ignored(extensions: Iterable[str]) -> list[str]:
    """Those that are neither a picture, nor a clip, nor a record: such members are not read."""
    return sorted(one for one in extensions if _kind(one) == "other" and one.rpartition(".")[2] not in ("json", "txt"))


def _measure(fd: int, extension: str, offset: int, size: int) -> tuple[int, int, int, int]:
    """(frames, rate, height, width) of a member; zeros where they do not apply or cannot be read."""
    kind = _kind(extension)
    if kind == "image":
        header = parse_header(lambda at, length: os.pread(fd, max(min(length, size - at), 0), offset + at), size)
        return (0, 0, header.height, header.width) if header else (0, 0, 0, 0)
    if kind == "audio":
        return (*(parse_audio_header(os.pread(fd, size, offset)) or (0, 0)), 0, 0)
    return 0, 0, 0, 0


def _save(index: ShardIndex, path: Path) -> None:
    meta: dict[str, int | list[str]] = {"version": _VERSION, "shard_size": index.size, "shard_mtime_ns": index.mtime_ns}
    meta |= {"samples": len(index), "members": len(index.all_members), "key_bytes": len(index.keys)}
    meta |= {"extensions": index.extensions, "reasons": index.reasons}
    head = json.dumps(meta).encode()
    head += b" " * (-(len(head) + 1) % 64) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads the shards may read their indexes, whatever the umask of the user who made them.
        with replacing(path, mode=0o644) as file:
            file.write(head)
            for array in (index.samples, index.all_members, index.keys):
                file.write(array.tobytes())
    except OSError as error:
        raise DataError(
            f"cannot write the index {path} ({error.strerror}): set data.cache_dir to a folder that can be written"
        ) from error


def _load(path: Path, shard: Path, size: int, mtime_ns: int) -> ShardIndex | None:
    """The saved index, or None if it is absent, out of date, of another version, or damaged."""
    try:
        with open(path, "rb") as file:
            head = file.readline()
            meta = json.loads(head)
            if (meta["version"], meta["shard_size"], meta["shard_mtime_ns"]) != (_VERSION, size, mtime_ns):
                return None
            lengths = [(meta["samples"] + 1) * _SAMPLE.itemsize, meta["members"] * _MEMBER.itemsize, meta["key_bytes"]]
            bounds = np.cumsum([len(head), *lengths])
            if os.fstat(file.fileno()).st_size != bounds[-1]:
                return None
            # One mapping for all arrays: each mapping holds a file descriptor. It is of the file that was just checked,
            # also if another process has replaced it meanwhile.
            blob = np.memmap(file, dtype=np.uint8, mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ShardIndex(
        path=shard,
        size=size,
        mtime_ns=mtime_ns,
        extensions=meta["extensions"],
        reasons=meta["reasons"],
        samples=blob[bounds[0] : bounds[1]].view(_SAMPLE),
        all_members=blob[bounds[1] : bounds[2]].view(_MEMBER),
        keys=blob[bounds[2] : bounds[3]],
    )
