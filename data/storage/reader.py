"""Read members of shards by position, from local files (one `pread` per member) and from object storage.

Every read names the indexed version.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data.errors import ShardError
from data.storage.file_cache import FileCache
from data.storage.files import (
    READS,
    RETRIES,
    ShardVersion,
    open_file,
    pread_all,
    retrying,
    sampled_blocks,
    version_hash,
)
from data.storage.object_store import start_read, start_reads, store_of
from data.storage.url import Changed, Place, Url

AHEAD_BYTES = 512 << 20
"""Maximum bytes of announced reads that nobody has requested yet."""

_OPEN_FILES = 128
_STAT_AGAIN = 5.0  # seconds between checks that the path still is the open file
_GAP, _LONGEST = 8 << 10, 8 << 20
"""Ranges with smaller gaps are read together, up to `_LONGEST` bytes. The gap spans headers and short records, so
adjacent images share one read. Images are larger, so reading only records reads little else."""
_LEAST_AHEAD, _MOST_AHEAD = 64 << 10, 8 << 20
_FAR = 4 << 20  # bytes between headers above which the gap is not read

Range = tuple[Url, int, int, ShardVersion]
"""A range of an object: URL, first byte, bytes, and required version."""


class ShardReader:
    """Reads byte ranges of shards and keeps recently used files open. `cache` keeps reads of remote shards.
    `bytes_read`: extension -> bytes read so far, to verify that a rank reads only its members."""

    def __init__(
        self,
        retries: int = RETRIES,
        clock: Callable[[], float] = time.monotonic,
        cache: FileCache | None = None,
    ) -> None:
        self.bytes_read: dict[str, int] = Counter()
        self._retries, self._clock = retries, clock
        self._lock = threading.Lock()
        self._files: dict[Path, _File] = {}  # the most recently used last
        self._remote = RemoteReader(retries, cache=cache)
        self._confirmed: dict[Path, tuple[int, ShardVersion]] = {}  # inode, and the version last seen there

    def read(self, path: Place, offset: int, size: int, extension: str, version: ShardVersion | None = None) -> bytes:
        """Read `size` bytes at `offset`.

        Args:
            version: the indexed version. Files are compared when they are opened and after every read, and their path
                every few seconds. Objects are compared at every read.

        Raises:
            ReadError: the file cannot be read after all retries.
            ShardError: it is not the indexed one, or ends early.
        """
        what = f"{path}: cannot read {size} bytes at byte {offset}"
        with READS.of(path):
            if isinstance(path, Url):
                raw = self._remote.read(path, offset, size, version)
            else:
                raw = retrying(lambda: self._read(path, offset, size, version), what, self._retries)
        with self._lock:
            self.bytes_read[extension] += len(raw)
        return raw

    def expect(self, ranges: Iterable[tuple[Place, int, int, ShardVersion]]) -> None:
        """Start to read ranges of objects: (URL, first byte, bytes, version). Later reads report errors."""
        self._remote.expect(
            (url, offset, size, version) for url, offset, size, version in ranges if isinstance(url, Url)
        )

    def close(self) -> None:
        """Close files, and forget announced ranges."""
        with self._lock:
            self._files.clear()
        self._remote.close()

    def _read(self, path: Path, offset: int, size: int, version: ShardVersion | None) -> bytes:
        try:
            file = self._open(path, version)
            raw = pread_all(file.fd, size, offset)
            if version is not None:
                self._confirm(path, file.fd, version)
        except OSError:
            # Reopen the file at the next try, which a stale handle needs, with descriptors to spare.
            with self._lock:
                self._files.clear()
            raise
        if len(raw) < size:
            raise ShardError(
                f"{path}: only {len(raw)} of {size} bytes at byte {offset}: the shard is shorter than its index. Copy "
                "or write the shard again."
            )
        return raw

    def _open(self, path: Path, version: ShardVersion | None) -> _File:
        with self._lock:
            file, now = self._files.pop(path, None), self._clock()
            if file is not None and version is not None and now >= file.stat_again:
                file.stat_again = now + _STAT_AGAIN
                with suppress(FileNotFoundError):  # a removed file can still be read while it is open
                    if not os.path.samestat(os.stat(path), os.fstat(file.fd)):
                        file = None
            if file is None:
                file = _File(open_file(path), now + _STAT_AGAIN)
                if version is not None:
                    self._confirm(path, file.fd, version)
                if hasattr(os, "posix_fadvise"):
                    # Samples are read in random order, so read-ahead is wasted.
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            self._files[path] = file
            return file

    def _confirm(self, path: Path, fd: int, version: ShardVersion) -> None:
        """Raise ShardError unless the open file still has the indexed content."""
        status = os.fstat(fd)
        inode, seen = self._confirmed.get(path, (status.st_ino, version))
        if inode != status.st_ino:
            seen = replace(seen, ctime_ns=-1)  # another file may have the same times
        now = seen.confirmed(fd, status)
        if now is None:
            before, after = (version.size, version.mtime_ns), (status.st_size, status.st_mtime_ns)
            difference = f"{before[0]} bytes of {before[1]} ns, now {after[0]} of {after[1]}"
            if before == after:
                difference = f"{before[0]} bytes as before, but with other content"
            raise ShardError(
                f"{path}: the shard changed after it was indexed ({difference}). Start the run again with shards that "
                "stay as they are."
            )
        self._confirmed[path] = (status.st_ino, now)


@dataclass
class _File:
    """An open shard, which is closed when nobody uses it any more."""

    fd: int
    stat_again: float

    def __del__(self) -> None:
        os.close(self.fd)


class RemoteReader:
    """Reads ranges of objects; announced ones are fetched in the background. `cache` keeps reads by tag."""

    def __init__(self, retries: int = RETRIES, ahead_bytes: int = AHEAD_BYTES, cache: FileCache | None = None) -> None:
        self._retries, self._max_bytes, self._cache = retries, ahead_bytes, cache
        self._started: OrderedDict[tuple[Url, int, int], _Slice] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def expect(self, ranges: Iterable[Range]) -> None:
        """Start to read ranges; adjacent ones share one read."""
        with self._lock:
            new = {item[:3]: item for item in ranges if item[:3] not in self._started and item[2] <= self._max_bytes}
            if self._cache is not None:
                new = {key: item for key, item in new.items() if not self._cache.has(_cache_key(*key, item[3].tag))}
            runs = [*_runs(new.values())]
            wanted = [
                (url, first, last + size - first, version.tag)
                for (url, first, _, version), (_, last, size, _) in ((run[0], run[-1]) for run in runs)
            ]
            for run, (url, first, _, _), future in zip(runs, wanted, start_reads(wanted), strict=True):
                for _, offset, size, _ in run:
                    while self._bytes + size > self._max_bytes:  # drop what was never requested
                        self._bytes -= self._started.popitem(last=False)[0][2]
                    self._started[url, offset, size] = _Slice(future, offset - first, size)
                    self._bytes += size

    def read(self, url: Url, offset: int, size: int, version: ShardVersion | None) -> bytes:
        """Read `size` bytes at `offset`. Raises ReadError after all retries, ShardError if the object has changed."""
        tag = version.tag if version is not None else ""

        def once() -> bytes:
            with self._lock:
                started = self._started.pop((url, offset, size), None)
                self._bytes -= size if started is not None else 0
            return bytes(_complete(url, started or start_read(url, offset, size, tag), size))

        what = f"{url}: cannot read {size} bytes at byte {offset}"
        if self._cache is None or not tag:  # without a tag the content is unknown
            return retrying(once, what, self._retries)
        key = _cache_key(url, offset, size, tag)
        if (url, offset, size) not in self._started:
            kept = self._cache.read(key)
            if kept is not None and len(kept) == size:
                return kept
        content = retrying(once, what, self._retries)
        self._cache.write(key, content)
        return content

    def close(self) -> None:
        """Forget announced ranges."""
        with self._lock:
            self._started.clear()
            self._bytes = 0


def _cache_key(url: Url, offset: int, size: int, tag: str) -> str:
    return f"{url}|{tag}|{offset}|{size}"


class _Slice(NamedTuple):
    """A part of a started read."""

    future: Future[memoryview]
    start: int
    size: int

    def result(self) -> memoryview:
        """Return the part; shorter if the answer is."""
        return self.future.result()[self.start : self.start + self.size]


def _runs(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Group ranges that are read together: of one object, with small gaps."""
    run: list[Range] = []
    for item in sorted(ranges, key=lambda item: item[:3]):
        if run:
            (url, first, _, version), (_, last, size, _) = run[0], run[-1]
            gap, length = item[1] - last - size, item[1] + item[2] - first
            if (url, version) != (item[0], item[3]) or not 0 <= gap <= _GAP or length > _LONGEST:
                yield run
                run = []
        run.append(item)
    if run:
        yield run


class WholeObject:
    """An object that is read from its beginning to build an index. Methods raise the errors of `RemoteReader.read`."""

    def __init__(self, url: Url, retries: int = RETRIES) -> None:
        self._url, self._retries = url, retries
        self._size, self._tag = (
            url.seen or retrying(lambda: store_of(url).look(url), f"{url}: cannot look at it", retries).seen
        )
        self._start, self._block, self._ahead = 0, memoryview(b""), _LEAST_AHEAD

    def is_same(self, version: ShardVersion) -> bool:
        """True if this is the version of an index."""
        return (version.size, version.tag) == (self._size, self._tag)

    def version(self) -> ShardVersion:
        """Return the version. Its content hash equals that of a file with this content."""
        ranges = sampled_blocks(self._size)
        started = start_reads([(self._url, start, length, self._tag) for start, length in ranges])
        blocks = [self._read(start, length, [future]) for future, (start, length) in zip(started, ranges, strict=True)]
        return ShardVersion(self._size, 0, 0, version_hash(self._size, blocks), self._tag)

    def read(self, length: int, offset: int) -> bytes:
        """Read `length` bytes at `offset`, or fewer at the end. Reads ahead, more and more, up to a distant offset."""
        length = max(min(length, self._size - offset), 0)
        if not length:
            return b""  # a damaged header may point anywhere
        end = self._start + len(self._block)
        if not self._start <= offset <= offset + length <= end:
            self._ahead = min(2 * self._ahead, _MOST_AHEAD) if 0 <= offset - end <= _FAR else _LEAST_AHEAD
            size = min(max(length, self._ahead), self._size - offset)
            self._start, self._block = offset, self._read(offset, size, [])
        return bytes(self._block[offset - self._start :][:length])

    def _read(self, offset: int, length: int, started: list[Future[memoryview]]) -> memoryview:
        """Read a range, first from `started`."""

        def once() -> memoryview:
            future = started.pop() if started else start_read(self._url, offset, length, self._tag)
            return _complete(self._url, future, length)

        return retrying(once, f"{self._url}: cannot read {length} bytes at byte {offset}", self._retries)


def _complete(url: Url, started: Future[memoryview] | _Slice, size: int) -> memoryview:
    """Return the content of a read. Raises ShardError for another version, OSError for a short answer."""
    try:
        content = started.result()
    except Changed as error:
        raise ShardError(
            f"{url}: the shard changed after it was indexed (it has another tag). Start the run again with shards that "
            "stay as they are."
        ) from error
    if len(content) != size:
        raise OSError(errno.EIO, f"the answer has {len(content)} bytes of {size}", str(url))
    return content
