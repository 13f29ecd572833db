"""The shards of one folder, and the file with their indexes.

It lies beside the shards, in `data.cache_dir`, or in the user's cache. What is missing there, out of date or damaged is
built, by one process of those that ask for it, and kept in a journal until all of it is there. Other shards of the file
stay as they are.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from data.catalogue.file import CatalogueFile, Part, cannot_write, load_catalogue, with_version, write_catalogue
from data.catalogue.journal import Journal, opened_journal
from data.catalogue.places import catalogue_path
from data.errors import DataError
from data.index import build_index, build_remote
from data.storage.remote import WholeObject
from data.storage.retry import retrying
from data.storage.url import Place, Url
from data.storage.version import ShardVersion, open_file, require_file

_log = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Gets how many more shards are indexed; those that were first."""

_ATTEMPTS = 3
_TELL = 20.0  # seconds between messages about what is being built


class Folder:
    """The shards of one folder, while they are opened."""

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
        self._progress, self._strict = progress or _Told().progress, strict
        self._path = catalogue_path(shards[0], cache_dir, writable=True)
        self._paths = list(dict.fromkeys([catalogue_path(shards[0], cache_dir), self._path]))
        self._names = [shard.name for shard in shards]
        self._objects: dict[Place, WholeObject] = {}
        self._seen: list[os.stat_result] | None = None
        self.errors: dict[int, DataError] = {}

    def opened(self) -> dict[int, tuple[CatalogueFile, int]]:
        """Shard's number -> where its part is."""
        found, moved = self._kept()
        self._progress(len(found))
        for _ in range(_ATTEMPTS):  # more than one only where others write the same file, and it cannot be locked
            if len(found) + len(self.errors) == len(self._shards):
                break
            found = self._completed()
        else:
            raise DataError(f"{self._path}: other processes write this index too: start again when they are done")
        if moved:
            try:
                return self._completed()
            except DataError:
                pass  # then the next start compares again; reads compare the content themselves
        return found

    def _kept(self) -> tuple[dict[int, tuple[CatalogueFile, int]], dict[int, ShardVersion]]:
        """(where the parts of shards are that are as they were, those of them that have other times by now)."""
        files = [file for path in self._paths if (file := load_catalogue(path)) is not None]
        found: dict[int, tuple[CatalogueFile, int]] = {}
        moved: dict[int, ShardVersion] = {}
        self._look()
        for file in files:
            same = self._same_object if isinstance(self._shards[0], Url) else self._same_file
            sizes, times, changes = (file.table[name].tolist() for name in ("size", "mtime_ns", "ctime_ns"))
            checks, broken = file.is_checked_at_once, list[str]()
            for at, name in enumerate(self._names):
                number = file.number_of.get(name)
                if at in found or at in self.errors or number is None:
                    continue
                version = same(at, file, number, sizes[number], times[number], changes[number])
                if version is None:
                    continue
                if checks and not file.is_whole(number):
                    broken.append(name)
                    continue
                found[at] = file, number
                if version is not _AS_IT_WAS:
                    moved[at] = version
            if broken:
                _log.warning("%s: the index is damaged where it has %s, and built again", file.path, broken[0])
        return found, moved

    def _look_again(self) -> None:
        self._seen, self._objects = None, {}
        self._look()

    def _look(self) -> None:
        """What stands at the places of shards; each is looked at once."""
        if self._seen is not None or isinstance(self._shards[0], Url):
            if self._seen is None:
                self._look_at_objects()
            return
        seen = []
        for at, shard in enumerate(self._shards):
            assert isinstance(shard, Path)
            try:
                seen.append(_looked_at(shard, self._retries))
            except DataError as error:
                self._failed(at, error)
                seen.append(os.stat_result((0,) * 10))
        self._seen = seen

    def _look_at_objects(self) -> None:
        unseen = [shard for shard in self._shards if isinstance(shard, Url) and shard not in self._objects]
        with ThreadPoolExecutor(8) as pool:
            self._objects |= zip(unseen, pool.map(lambda url: WholeObject(url, self._retries), unseen), strict=True)

    def _same_object(self, at: int, file: CatalogueFile, number: int, *_: int) -> ShardVersion | None:
        return _AS_IT_WAS if self._objects[self._shards[at]].is_same(file.version(number)) else None

    def _same_file(
        self, at: int, file: CatalogueFile, number: int, size: int, mtime_ns: int, ctime_ns: int
    ) -> ShardVersion | None:
        """The version of a shard whose content is that of a part; None if it is another."""
        assert self._seen is not None
        found, shard = self._seen[at], self._shards[at]
        if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
            return None
        if found.st_ctime_ns == ctime_ns:
            return _AS_IT_WAS
        assert isinstance(shard, Path)
        return retrying(partial(_confirmed, shard, file.version(number)), f"{shard}: cannot read it", self._retries)

    def _completed(self) -> dict[int, tuple[CatalogueFile, int]]:
        """All of them, after what is missing has been built."""
        stopped: DataError | None = None
        try:
            with opened_journal(self._path.with_name(self._path.name + ".journal")) as journal:
                self._look_again()  # another process may have worked meanwhile
                found, moved = self._kept()
                missing = {name: at for at, name in enumerate(self._names) if at not in found and at not in self.errors}
                records = self._of_journal(journal, missing)
                left = [at for name, at in missing.items() if name not in records]
                for at, part in self._built(left):
                    self._progress(1)
                    if isinstance(part, Part):
                        journal.append(part.head(), part.body)
                        records[part.name] = len(journal) - 1
                        continue
                    self.errors[at] = part
                    if self._strict:
                        stopped = part
                        break
                if records or moved:
                    versions = {self._names[at]: version for at, version in moved.items()}
                    self._save(versions, {name: Part.from_head(*journal[at]) for name, at in records.items()})
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if stopped is not None:
            raise stopped
        self._look_again()
        return self._kept()[0]

    def _of_journal(self, journal: Journal, missing: Mapping[str, int]) -> dict[str, int]:
        """Missing shard's name -> the record with its part."""
        records = {}
        for number in range(len(journal)):
            try:
                part = Part.from_head(*journal[number])
            except (ValueError, TypeError):  # of another version of this program
                continue
            if part.name in missing and self._is_current(missing[part.name], part.version) and not part.fault():
                records[part.name] = number
        return records

    def _is_current(self, at: int, version: ShardVersion) -> bool:
        """Whether a shard is the one that a journal has."""
        shard = self._shards[at]
        if isinstance(shard, Url):
            return self._objects[shard].is_same(version)
        assert self._seen is not None
        return not version.dated(self._seen[at]) and version.ctime_ns == self._seen[at].st_ctime_ns

    def _built(self, missing: Sequence[int]) -> Iterator[tuple[int, Part | DataError]]:
        """The parts of shards, as they are done; an error in place of one that has none."""
        places = [self._shards[at] for at in missing]
        if places and isinstance(places[0], Url):
            with ThreadPoolExecutor(8) as pool:
                yield from zip(missing, pool.map(self._of_object, places), strict=True)
            return
        processes = min(self._processes, len(missing))
        if processes <= 1:
            for at, place in zip(missing, places, strict=True):
                yield at, _part_of(place, self._retries)
            return
        # Not forked: this process may have threads, and locks that one of them holds.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            work = pool.map(partial(_part_of, retries=self._retries), places, chunksize=4)
            try:
                yield from zip(missing, work, strict=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _of_object(self, shard: Place) -> Part | DataError:
        assert isinstance(shard, Url)
        try:
            return Part.of(build_remote(shard, self._objects[shard]))
        except DataError as error:
            return error

    def _save(self, versions: Mapping[str, ShardVersion], parts: Mapping[str, Part]) -> None:
        """Writes the file again, with other versions of some shards and other parts of some."""
        files = [file for path in self._paths if (file := load_catalogue(path)) is not None]
        wanted = set(self._names)
        kept: dict[str, Part] = {}
        for file in files:
            for name, number in file.number_of.items():
                if name in parts or name in kept or not file.is_whole(number):
                    continue
                if name not in wanted and (file.path != self._path or not self._is_there(name)):
                    continue
                part = file.part(number)
                kept[name] = with_version(part, versions[name]) if name in versions else part
        write_catalogue(self._path, chain(kept.values(), parts.values()))

    def _is_there(self, name: str) -> bool:
        """Whether another shard of the folder still is, as far as that is known."""
        folder = self._shards[0].parent
        return not isinstance(folder, Path) or (folder / name).exists()

    def _failed(self, at: int, error: DataError) -> None:
        if self._strict:
            raise error
        self.errors[at] = error


_AS_IT_WAS = ShardVersion(0, 0, 0, "as it was")


def _part_of(shard: Place, retries: int) -> Part | DataError:
    """At module level, so that worker processes can find it."""
    try:
        return Part.of(build_index(shard, retries))
    except DataError as error:
        return error


def _looked_at(shard: Path, retries: int) -> os.stat_result:
    try:
        found = os.stat(shard)
    except OSError:
        found = retrying(partial(os.stat, shard), f"{shard}: cannot look at it", retries)
    if not stat.S_ISREG(found.st_mode):
        require_file(shard, found)
    return found


def _confirmed(shard: Path, version: ShardVersion) -> ShardVersion | None:
    fd = open_file(shard)
    try:
        return version.confirmed(fd, os.fstat(fd))
    finally:
        os.close(fd)


class _Told:
    """Progress to the log, now and then."""

    def __init__(self) -> None:
        self._told, self._done = time.monotonic(), 0

    def progress(self, more: int) -> None:
        """See `Progress`."""
        self._done += more
        if time.monotonic() - self._told > _TELL:
            self._told = time.monotonic()
            _log.info("%d shards indexed", self._done)
