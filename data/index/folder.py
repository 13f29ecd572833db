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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.index.file import CatalogueFile, Part, load_catalogue, with_version, write_catalogue
from data.index.journal import Journal, opened_journal
from data.index.locations import catalogue_path
from data.index.shard_index import build_index, build_remote
from data.index.shard_list import Found
from data.processes import worker_processes
from data.storage.files import ShardVersion, cannot_write, open_file, require_file, retrying
from data.storage.reader import WholeObject
from data.storage.url import Place, Url
from data.text_format import plural

_log = logging.getLogger(__name__)

Progress = Callable[[int], None]
"""Gets how many more shards are indexed; those that were first."""

_SEEN = np.dtype([("mode", "<i8"), ("size", "<i8"), ("mtime_ns", "<i8"), ("ctime_ns", "<i8")])
_fields_seen = attrgetter("st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")
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
        self._seen: np.ndarray | None = None  # of files, `_SEEN`
        self.errors: dict[int, DataError] = {}

    def opened(self) -> Found[CatalogueFile]:
        """Where the parts of the shards are; of those in `errors` there is none."""
        found, moved = self._kept()
        self._progress(int(np.count_nonzero(~found.missing)))
        attempts = 0  # more than one only where others write the same file, and it cannot be locked
        while np.count_nonzero(found.missing) != len(self.errors):
            if attempts == _ATTEMPTS:
                raise DataError(f"{self._path}: other processes write this index too: start again when they are done")
            found, attempts = self._completed(), attempts + 1
        if moved:
            try:
                return self._completed()
            except DataError:
                pass  # then the next start compares again; reads compare the content themselves
        return found

    def _kept(self) -> tuple[Found[CatalogueFile], dict[int, ShardVersion]]:
        """(where the parts of shards are that are as they were, those of them that have other times by now)."""
        files = [file for path in self._paths if (file := load_catalogue(path)) is not None]
        found, moved = Found[CatalogueFile].of_none(len(self._shards)), dict[int, ShardVersion]()
        self._look()
        for file in files:
            rows = file.numbers_of(self._names)
            wanted = found.missing & (rows >= 0)
            wanted[[*self.errors]] = False
            same = self._same_objects if isinstance(self._shards[0], Url) else self._same_files
            which, other_times = same(file, rows, np.flatnonzero(wanted))
            if file.is_checked_at_once and not file.are_all_whole():
                broken = [at for at in which.tolist() if not file.is_whole(int(rows[at]))]
                if broken:
                    name = self._names[broken[0]]
                    _log.warning("%s: the index is damaged where it has %s, and built again", file.path, name)
                which = which[~np.isin(which, broken)]
            found.take(file, rows, which)
            taken = set(which.tolist()) if other_times else set()
            moved |= {at: version for at, version in other_times.items() if at in taken}
        return found, moved

    def _look_again(self) -> None:
        self._seen, self._objects = None, {}
        self._look()

    def _look(self) -> None:
        """What stands at the places of shards; each is looked at once."""
        if isinstance(self._shards[0], Url):
            if not self._objects:
                self._look_at_objects()
            return
        if self._seen is not None:
            return
        try:
            seen = _all_seen(map(os.stat, map(str, self._shards)), len(self._shards))
            unclear = np.flatnonzero(seen["mode"] & stat.S_IFMT(0xFFFF) != stat.S_IFREG)
        except OSError:
            seen, unclear = np.zeros(len(self._shards), dtype=_SEEN), np.arange(len(self._shards))
        for at in unclear.tolist():
            try:
                seen[at] = _fields_seen(_looked_at(Path(str(self._shards[at])), self._retries))
            except DataError as error:
                self._failed(at, error)
                seen[at] = 0
        self._seen = seen

    def _look_at_objects(self) -> None:
        unseen = [shard for shard in self._shards if isinstance(shard, Url) and shard not in self._objects]
        with ThreadPoolExecutor(8) as pool:
            self._objects |= zip(unseen, pool.map(lambda url: WholeObject(url, self._retries), unseen), strict=True)

    def _same_objects(
        self, file: CatalogueFile, rows: np.ndarray, which: np.ndarray
    ) -> tuple[np.ndarray, dict[int, ShardVersion]]:
        """As `_same_files`."""
        objects = ((at, self._objects[self._shards[at]]) for at in which.tolist())
        same = [at for at, one in objects if one.is_same(file.version(int(rows[at])))]
        return np.array(same, dtype=np.int64), {}

    def _same_files(
        self, file: CatalogueFile, rows: np.ndarray, which: np.ndarray
    ) -> tuple[np.ndarray, dict[int, ShardVersion]]:
        """(of the shards `which`, those whose content is that of their parts, the version of those of them that have
        other times by now)."""
        assert self._seen is not None
        seen, table = self._seen[which], file.table[rows[which]]
        same = (seen["size"] == table["size"]) & (seen["mtime_ns"] == table["mtime_ns"])
        moved = {}
        for place in np.flatnonzero(same & (seen["ctime_ns"] != table["ctime_ns"])).tolist():
            at = int(which[place])
            shard, was = self._shards[at], file.version(int(rows[at]))
            assert isinstance(shard, Path)
            version = retrying(partial(_confirmed, shard, was), f"{shard}: cannot read it", self._retries)
            same[place] = version is not None
            if version is not None:
                moved[at] = version
        return which[same], moved

    def _completed(self) -> Found[CatalogueFile]:
        """All of them, after what is missing has been built."""
        stopped: DataError | None = None
        try:
            with opened_journal(self._path.with_name(self._path.name + ".journal")) as journal:
                self._look_again()  # another process may have worked meanwhile
                found, moved = self._kept()
                lacking = (at for at in np.flatnonzero(found.missing).tolist() if at not in self.errors)
                missing = {self._names[at]: at for at in lacking}
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
            raise cannot_write("index", self._path, error) from error
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
        return (version.size, version.mtime_ns, version.ctime_ns) == self._seen[at].item()[1:]

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
        with worker_processes(processes) as pool:
            work = pool.map(partial(_part_of, retries=self._retries), places, chunksize=4)
            yield from zip(missing, work, strict=True)

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


def _part_of(shard: Place, retries: int) -> Part | DataError:
    """At module level, so that worker processes can find it."""
    try:
        return Part.of(build_index(shard, retries))
    except DataError as error:
        return error


def _all_seen(looks: Iterable[os.stat_result], shards: int) -> np.ndarray:
    """`_SEEN` of each; nothing is kept of a look but its numbers."""
    numbers = chain.from_iterable(map(_fields_seen, looks))
    return np.fromiter(numbers, dtype=np.int64, count=shards * _SEEN.itemsize // 8).view(_SEEN)


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
            _log.info("%s indexed", plural(self._done, "shard"))
