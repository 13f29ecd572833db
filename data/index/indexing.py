"""Build indexes of shards: of one, or of a folder's that are missing, outdated or damaged."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np

from data.errors import DataError, MissingLibrary, ShardError
from data.index import index_file
from data.index.find_shards import refuse_compressed
from data.index.index_file import UNIT, FolderFile, IndexFile, Located, Part
from data.index.shard_index import MEMBER, SAMPLE, Codes, ShardIndex, pack_keys, pack_video
from data.media.headers import parse_extent, parse_video_header, reader_of
from data.records.members import arrange, kind_of
from data.rows.row_reader import is_table, table_rows
from data.storage.files import READS, RETRIES, ReadRange, ShardVersion, open_file, pread_all, require_file, retrying
from data.storage.reader import WholeObject
from data.storage.tar import walk_tar
from data.storage.url import Place, Url, place_of
from data.workers import worker_processes

_log = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Receives the number of newly indexed shards; the first call counts existing ones."""

_STATUS = np.dtype([("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8")])
_status_of = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns")
_ATTEMPTS = 3
_NAME = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


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
        self._progress, self._strict = progress or (lambda _: None), strict
        self._file = FolderFile(shards, cache_dir, ".mimo-catalogue", "index")
        self._objects: list[WholeObject] = []
        self._status = np.zeros(len(shards), dtype=_STATUS)  # of files
        self._moved: dict[str, ShardVersion] = {}
        self.errors: dict[int, DataError] = {}

    def opened(self) -> Located:
        """Return the located parts of all shards except those in `errors`. Raises DataError if the index cannot be
        written, and with `strict` the error of a shard."""
        self._load()
        self._progress(len(self._shards) - len(self._missing()))
        for _ in range(_ATTEMPTS):  # several only if others write the same file without locks
            if not self._missing():
                break
            self._complete()
        if self._missing():
            raise DataError(f"{self._file.path}: other processes write this index too. Start again when they end")
        located = self._file.located
        if self._moved:
            with suppress(DataError):  # the next start compares again; reads verify the content
                self._complete()
                located = self._file.located
        return located

    def _missing(self) -> list[int]:
        return [shard for shard in np.flatnonzero(self._file.located.missing).tolist() if shard not in self.errors]

    def _load(self) -> None:
        """Check the shards, and locate parts of their current versions."""
        if isinstance(self._shards[0], Url):
            with ThreadPoolExecutor(8) as pool:
                self._objects = [*pool.map(partial(WholeObject, retries=self._retries), self._shards)]
        for number, shard in enumerate(self._shards):
            if isinstance(shard, Path):
                try:
                    status = retrying(partial(os.stat, shard), f"{shard}: cannot look at it", self._retries)
                    require_file(shard, status)
                    self._status[number] = _status_of(status)
                except DataError as error:
                    if self._strict:
                        raise
                    self.errors[number] = error
        self._moved = {}
        self._file.load(self._current)

    def _current(self, file: IndexFile, rows: np.ndarray, shards: np.ndarray) -> np.ndarray:
        """Implement `current` of `FolderFile.load`. Notes shards with other times but the same content."""
        if self._objects:
            is_same = [self._objects[shard].is_same(file.version(int(rows[shard]))) for shard in shards.tolist()]
            return shards[np.array(is_same, dtype=bool)]
        status, table = self._status[shards], file.table[rows[shards]]
        same = (status["size"] == table["size"]) & (status["mtime_ns"] == table["mtime_ns"])
        for place in np.flatnonzero(same & (status["ctime_ns"] != table["ctime_ns"])).tolist():
            shard = self._shards[shards[place]]
            assert isinstance(shard, Path)
            before = file.version(int(rows[shards[place]]))
            version = retrying(partial(_confirmed, shard, before), f"{shard}: cannot read it", self._retries)
            same[place] = version is not None
            if version is not None:
                self._moved[shard.name] = version
        return shards[same]

    def _complete(self) -> None:
        with self._file.lock():
            self._load()  # another process may have worked meanwhile
            new: dict[str, Part] = {}
            missing, saved = self._missing(), time.monotonic()
            try:
                for number, (shard, part) in enumerate(self._built(missing), 1):
                    self._progress(1)
                    if isinstance(part, Part):
                        new[part.name] = part
                    elif self._strict:
                        raise part
                    else:
                        self.errors[shard] = part
                    if time.monotonic() - saved > index_file.SAVE_SECONDS:
                        _log.info("%d of %d shards indexed", number, len(missing))
                        self._file.save(new, self._moved)
                        new.clear()
                        saved = time.monotonic()
            finally:
                if new or self._moved:
                    self._file.save(new, self._moved)
        self._load()

    def _built(self, missing: Sequence[int]) -> Iterator[tuple[int, Part | DataError]]:
        shards, processes = [self._shards[shard] for shard in missing], min(self._processes, len(missing))
        build = partial(_part_of, retries=self._retries)
        if not self._objects and processes <= 1:
            yield from zip(missing, map(build, shards), strict=True)
            return
        with ThreadPoolExecutor(8) if self._objects else worker_processes(processes) as pool:
            yield from zip(missing, pool.map(build, shards, chunksize=4), strict=True)


def build_index(shard: str | os.PathLike[str] | Url, retries: int = RETRIES) -> ShardIndex:
    """Index a shard by its headers and media headers; writes nothing.

    Raises:
        ShardError: the shard is no file, compressed, truncated or damaged, or changes meanwhile.
        ReadError: it cannot be read after `retries`.
    """
    shard = place_of(shard)
    refuse_compressed(str(shard))
    if isinstance(shard, Url):
        source = WholeObject(shard, retries)
        return _build(shard, source.version(), source.read)
    fd = retrying(lambda: open_file(shard), f"{shard}: cannot open it", retries)

    def read(length: int, offset: int) -> bytes:
        what = f"{shard}: cannot read {length} bytes at byte {offset}"
        return retrying(lambda: pread_all(fd, length, offset), what, retries)

    try:
        before = retrying(lambda: ShardVersion.of(fd), f"{shard}: cannot read it", retries)
        index = _build(shard, before, read)
        if os.fstat(fd).st_mtime_ns != before.mtime_ns or os.fstat(fd).st_size != before.size:
            raise ShardError(f"{shard}: the shard changed while it was indexed. Start again when it is complete.")
        return index
    finally:
        os.close(fd)


def _build(shard: Place, version: ShardVersion, read: ReadRange) -> ShardIndex:
    codes, reasons = dict[tuple[str, str], int](), dict[str, int]()
    samples, members, keys = list[tuple[int, int, int]](), list[tuple[int, ...]](), list[str]()
    with READS.of(shard):
        try:
            for key, sample in (_rows if is_table(shard) else _samples)(shard, read, version.size):
                arranged = arrange(tuple(extension for extension, *_ in sample))
                reason = reasons.setdefault(arranged.reason, len(reasons) + 1) if arranged.reason else 0
                samples.append((len(members), arranged.record, reason))
                for place, kind in zip(arranged.order, arranged.kinds, strict=True):
                    extension, *numbers = sample[place]
                    members.append((*numbers, codes.setdefault((extension, kind), len(codes))))
                keys.append(key)
        except MissingLibrary as error:
            raise MissingLibrary(f"{shard}: {error}") from error
    return ShardIndex(
        path=shard,
        version=version,
        codes=Codes(tuple(name for name, _ in codes), tuple(kind for _, kind in codes), tuple(reasons)),
        samples=np.array([*samples, (len(members), -1, 0)], dtype=SAMPLE),
        all_members=np.array(members, dtype=MEMBER),
        packed_keys=pack_keys(keys),
    )


_Members = list[tuple[str, int, int, int, int, int]]
"""(extension, offset, size, first and second number of the extent, sound) of each member of a sample."""


def _samples(shard: Place, read: ReadRange, size: int) -> Iterator[tuple[str, _Members]]:
    """Yield (key, members) of the samples of a tar."""
    for key, files in groupby(_split_names(walk_tar(shard, read, size)), itemgetter(0)):
        yield key, [(name, at, length, *_measure(read, name, at, length)) for _, name, at, length in files]


def _rows(shard: Place, read: ReadRange, size: int) -> Iterator[tuple[str, _Members]]:
    """Yield (key, members) of the rows of a parquet file."""
    for key, members in table_rows(shard, read, size):
        READS.count += 1
        measured = []
        for extension, offset, raw in members:
            measured.append((extension, offset, len(raw), *_measure(reader_of(raw), extension, 0, len(raw))))
        yield key, measured


def _split_names(walk: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (key, extension, offset, size) of the members that belong to samples."""
    for name, offset, size in walk:
        READS.count += 1
        match = _NAME.match(name)
        if match is not None and not _META.search(name):
            yield match[1], match[2].lower(), offset, size


def _measure(read: ReadRange, extension: str, offset: int, size: int) -> tuple[int, int, int]:
    """Return (first, second, sound) of `MEMBER`; zeros if there is none or it is unreadable."""
    kind = kind_of(extension)

    def read_member(length: int, at: int) -> bytes:
        return read(max(min(length, size - at), 0), offset + at)

    if kind == "video":
        video = parse_video_header(read_member, size)
        if video is None:
            return 0, 0, 0
        extent = pack_video(video.height, video.width, video.frames, *video.rate.as_integer_ratio())
        return (*extent, video.sound)
    first, second = (parse_extent(kind, read_member, size) if kind != "other" else None) or (0, 0)
    return (first, second, 0) if first < 1 << 63 and second < 1 << 31 else (0, 0, 0)


def _part_of(shard: Place, retries: int) -> Part | DataError:
    """Index a shard; at module level for pickling."""
    try:
        index = build_index(shard, retries)
    except DataError as error:
        return error
    rows = len(index), len(index.all_members), len(index.packed_keys)
    body = b"".join((index.samples.tobytes(), index.all_members.tobytes(), index.packed_keys))
    return Part(shard.name, index.version, body + bytes(-len(body) % UNIT), rows, astuple(index.codes))


def _confirmed(shard: Path, version: ShardVersion) -> ShardVersion | None:
    fd = open_file(shard)
    try:
        return version.confirmed(fd, os.fstat(fd))
    finally:
        os.close(fd)
