"""Build the indexes of the shards of one folder that are missing, out of date or damaged."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.index.folder_file import FolderFile, SaveTimer
from data.index.index_file import UNIT, IndexFile, Located, Part
from data.index.shard_index import ShardIndex, build_index, build_remote
from data.processes import worker_processes
from data.storage.files import ShardVersion, open_file, require_file, retrying
from data.storage.reader import WholeObject
from data.storage.url import Place, Url
from data.text_format import plural

_log = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Gets how many more shards are indexed; those that were first."""

_STATUS = np.dtype([("mode", "<i8"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8")])
_status_fields = attrgetter("st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")
_ATTEMPTS = 3
_LOG_SECONDS = 20.0  # between messages about progress


class FolderIndex:
    """The indexes of the shards of one folder, while they are opened; arguments as of `open_catalogue`.

    Attributes:
        errors: number of a shard -> why it has no index.
    """

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
        """Where the parts of the shards are; of those in `errors` there is none."""
        self._load()
        self._progress(int(np.count_nonzero(~self._file.located.missing)))
        attempts = 0  # more than one only where others write the same file, and it cannot be locked
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
                return located  # the next start compares again; reads compare the content themselves
        return self._file.located

    def _load(self) -> None:
        """Look at the shards, and for parts of their present versions."""
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
        """See `FolderFile.load`; notes those that have other times and the same content."""
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
        """Build and save what is missing."""
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
        """The parts of shards, as they are done; an error in place of one that has none."""
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


def part_of(index: ShardIndex) -> Part:
    """Return the part of a shard that was indexed."""
    rows = len(index), len(index.all_members), len(index.packed_keys)
    body = b"".join((index.samples.tobytes(), index.all_members.tobytes(), index.packed_keys))
    return Part(index.path.name, index.version, body + bytes(-len(body) % UNIT), rows, astuple(index.codes))


def _part_of(shard: Place, retries: int) -> Part | DataError:
    """At module level, so that worker processes can find it."""
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
    """`_STATUS` of each; of a result only its numbers are kept."""
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
    """Progress in log messages, now and then."""

    def __init__(self) -> None:
        self._logged, self._done = time.monotonic(), 0

    def add(self, more: int) -> None:
        """See `Progress`."""
        self._done += more
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            _log.info("%s indexed", plural(self._done, "shard"))
