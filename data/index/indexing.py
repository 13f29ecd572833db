"""Build indexes of shards: of one, or of a folder's that are missing, outdated or damaged."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, MissingLibrary, ShardError
from data.index.folder_file import FolderFile, SaveTimer
from data.index.index_file import UNIT, IndexFile, Located, Part
from data.index.shard_index import MEMBER, SAMPLE, Codes, ShardIndex, pack_keys
from data.index.shard_names import refuse_compressed
from data.media.headers import parse_audio_header, parse_header, parse_video_header
from data.processes import worker_processes
from data.records.members import arrange, kind_of
from data.storage.files import READS, RETRIES, ShardVersion, open_file, pread_all, require_file, retrying
from data.storage.reader import WholeObject
from data.storage.tar import ReadRange, walk_tar
from data.storage.url import Place, Url, place_of
from data.text_format import plural

_log = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Receives the number of newly indexed shards; the first call counts existing ones."""

_STATUS = np.dtype([("mode", "<i8"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8")])
_status_fields = attrgetter("st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")
_ATTEMPTS = 3
_NAME = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_LOG_SECONDS = 20.0  # between messages about progress


class FolderIndex:
    """The indexes of one folder's shards while they are opened. See `open_catalogue`. `errors`: shard -> error."""

    def __init__(
        self,
        shards: Sequence[Place],
        cache_dir: str | os.PathLike[str] | None,
        retries: int,
        processes: int,
        progress: Progress | None,
        strict: bool,
    ) -> None:
        self._shards, self._retries, self._processes = shards, retries, processes
        self._progress, self._strict = progress or _LogProgress().add, strict
        self._file = FolderFile(shards, cache_dir, ".mimo-catalogue", "index")
        self._objects: list[WholeObject] | None = None
        self._status: np.ndarray | None = None  # of files, `_STATUS`
        self._moved: dict[str, ShardVersion] = {}
        self.errors: dict[int, DataError] = {}

    def opened(self) -> Located:
        """Return the located parts of all shards except those in `errors`."""
        self._load()
        self._progress(int(np.count_nonzero(~self._file.located.missing)))
        attempts = 0  # several only if others write the same file without locks
        while np.count_nonzero(self._file.located.missing) != len(self.errors):
            if attempts == _ATTEMPTS:
                raise DataError(f"{self._file.path}: other processes write this index too: start again when they end")
            self._complete()
            attempts += 1
        if self._moved:
            located = self._file.located
            try:
                self._complete()
            except DataError:
                return located  # the next start compares again; reads verify the content
        return self._file.located

    def _load(self) -> None:
        """Check the shards, and locate parts of their current versions."""
        if isinstance(self._shards[0], Url):
            urls = [shard for shard in self._shards if isinstance(shard, Url)]
            with ThreadPoolExecutor(8) as pool:
                self._objects = [*pool.map(partial(WholeObject, retries=self._retries), urls)]
        else:
            self._look_at_files()
        self._moved = {}
        self._file.load(self._current)

    def _look_at_files(self) -> None:
        try:
            status = _statuses(map(os.stat, map(str, self._shards)), len(self._shards))
            unclear = np.flatnonzero(status["mode"] & stat.S_IFMT(0xFFFF) != stat.S_IFREG)
        except OSError:
            status, unclear = np.zeros(len(self._shards), dtype=_STATUS), np.arange(len(self._shards))
        self._status = status
        for shard in unclear.tolist():
            path = Path(str(self._shards[shard]))
            try:
                status[shard] = _status_fields(_stat_file(path, self._retries))
            except DataError as error:
                if self._strict:
                    raise
                self.errors[shard] = error
                status[shard] = 0

    def _current(self, file: IndexFile, rows: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Implement `current` of `FolderFile.load`. Notes shards with other times but the same content."""
        which = which[[shard not in self.errors for shard in which.tolist()]] if self.errors else which
        if self._objects is not None:
            objects = self._objects
            is_same = [objects[shard].is_same(file.version(int(rows[shard]))) for shard in which.tolist()]
            return which[np.array(is_same, dtype=bool)]
        assert self._status is not None
        status, table = self._status[which], file.table[rows[which]]
        same = (status["size"] == table["size"]) & (status["mtime_ns"] == table["mtime_ns"])
        for place in np.flatnonzero(same & (status["ctime_ns"] != table["ctime_ns"])).tolist():
            shard = self._shards[which[place]]
            assert isinstance(shard, Path)
            before = file.version(int(rows[which[place]]))
            version = retrying(partial(_confirmed, shard, before), f"{shard}: cannot read it", self._retries)
            same[place] = version is not None
            if version is not None:
                self._moved[shard.name] = version
        return which[same]

    def _complete(self) -> None:
        with self._file.lock():
            self._load()  # another process may have worked meanwhile
            new: dict[str, Part] = {}
            missing = [at for at in np.flatnonzero(self._file.located.missing).tolist() if at not in self.errors]
            timer, stopped = SaveTimer(), None
            try:
                for shard, part in self._built(missing):
                    self._progress(1)
                    if isinstance(part, Part):
                        new[part.name] = part
                    elif self._strict:
                        stopped = part
                        break
                    else:
                        self.errors[shard] = part
                    if timer.is_due():
                        with timer.saving():
                            self._file.save(new, self._moved)
                        new.clear()
            finally:
                if new or self._moved:
                    self._file.save(new, self._moved)
        if stopped is not None:
            raise stopped
        self._load()

    def _built(self, missing: Sequence[int]) -> Iterator[tuple[int, Part | DataError]]:
        shards, processes = [self._shards[shard] for shard in missing], min(self._processes, len(missing))
        if self._objects is not None:
            with ThreadPoolExecutor(8) as pool:
                parts = pool.map(_part_of_object, shards, [self._objects[shard] for shard in missing])
                yield from zip(missing, parts, strict=True)
        elif processes <= 1:
            for shard, path in zip(missing, shards, strict=True):
                yield shard, _part_of(path, self._retries)
        else:
            with worker_processes(processes) as pool:
                parts = pool.map(partial(_part_of, retries=self._retries), shards, chunksize=4)
                yield from zip(missing, parts, strict=True)


def build_remote(shard: Url, source: WholeObject) -> ShardIndex:
    """Index an open object. Raises ShardError and ReadError as `build_index`."""
    refuse_compressed(str(shard))
    return _build(shard, source.version(), source.read)


def build_index(shard: str | os.PathLike[str] | Url, retries: int = RETRIES) -> ShardIndex:
    """Index a shard by its headers and media headers; writes nothing.

    Raises:
        ShardError: the shard is no file, compressed, truncated or damaged, or changes meanwhile.
        ReadError: it cannot be read after `retries`.
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
    """Assigns codes to values, from 0 in order of occurrence."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of(self, found: Any) -> int:
        return self.known.setdefault(found, len(self.known))


class IndexBuilder:
    """Builds an index from samples in shard order."""

    def __init__(self) -> None:
        self._codes, self._reasons = _Codes(), _Codes()
        self._samples: list[tuple[int, int, int]] = []
        self._members: list[tuple[int, ...]] = []
        self._keys: list[str] = []

    def add(self, key: str, names: Sequence[str], places: Sequence[tuple[int, int, int, int]]) -> None:
        """Add a sample with its members' extensions `names` and `places`: offset, size, both numbers of the extent."""
        found = arrange(tuple(names))
        reason = self._reasons.of(found.reason) + 1 if found.reason else 0
        self._samples.append((len(self._members), found.record, reason))
        for place, kind in zip(found.order, found.kinds, strict=True):
            self._members.append((*places[place], self._codes.of((names[place], kind))))
        self._keys.append(key)

    def index(self, path: Place, version: ShardVersion) -> ShardIndex:
        """Return the index of all samples so far."""
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
    """Yield (key, extensions, results of `take`) of every sample of a tar, walked by `walk_tar`.

    `take` gets the key, extension, offset and size of a member before the walk continues.
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
    """Return the extent for `MEMBER`; zeros if there is none or it is unreadable."""
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


def part_of(index: ShardIndex) -> Part:
    """Return the part of an indexed shard."""
    rows = len(index), len(index.all_members), len(index.packed_keys)
    body = b"".join((index.samples.tobytes(), index.all_members.tobytes(), index.packed_keys))
    return Part(index.path.name, index.version, body + bytes(-len(body) % UNIT), rows, astuple(index.codes))


def _part_of(shard: Place, retries: int) -> Part | DataError:
    """Index a shard; at module level for pickling."""
    try:
        return part_of(build_index(shard, retries))
    except DataError as error:
        return error


def _part_of_object(shard: Place, source: WholeObject) -> Part | DataError:
    assert isinstance(shard, Url)
    try:
        return part_of(build_remote(shard, source))
    except DataError as error:
        return error


def _statuses(results: Iterable[os.stat_result], shards: int) -> np.ndarray:
    """Return `_STATUS` of each result; only numbers are kept."""
    numbers = chain.from_iterable(map(_status_fields, results))
    return np.fromiter(numbers, dtype=np.int64, count=shards * _STATUS.itemsize // 8).view(_STATUS)


def _stat_file(shard: Path, retries: int) -> os.stat_result:
    status = retrying(partial(os.stat, shard), f"{shard}: cannot look at it", retries)
    require_file(shard, status)
    return status


def _confirmed(shard: Path, version: ShardVersion) -> ShardVersion | None:
    fd = open_file(shard)
    try:
        return version.confirmed(fd, os.fstat(fd))
    finally:
        os.close(fd)


class _LogProgress:
    """Logs progress regularly."""

    def __init__(self) -> None:
        self._logged, self._done = time.monotonic(), 0

    def add(self, more: int) -> None:
        """Count more shards. See `Progress`."""
        self._done += more
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            _log.info("%s indexed", plural(self._done, "shard"))
