"""Shards that are objects: reading members, many at a time, and the whole of one for its index.

Every read names the version that was indexed, by its tag, and every answer has the length that was asked for.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from data.errors import ShardError
from data.storage.base import Changed
from data.storage.file_cache import FileCache
from data.storage.io_thread import start_read, start_reads
from data.storage.retry import RETRIES, retrying
from data.storage.stores import store_of
from data.storage.url import Url
from data.storage.version import ShardVersion, hash_of, sampled

AHEAD_BYTES = 512 << 20
"""Of reads that have begun and were not yet asked for."""

_BLOCK, _BLOCKS_AHEAD = 1 << 20, 8
_BETWEEN, _LONGEST = 8 << 10, 8 << 20
"""Ranges with less between them are read together, up to so many bytes. Headers and short records are less, so that
pictures of neighbours come in one read; pictures are more, so that who reads records alone reads little else."""
_FAR = 4 << 20  # bytes from one header to the next, from which on what is between is not read
_HEADER = 1 << 16


Range = tuple[Url, int, int, ShardVersion]
"""Of an object: first byte, bytes, and what it has to be."""


class RemoteReader:
    """Reads ranges of objects; those that are announced are on their way meanwhile.

    Args:
        retries: times that a read is tried again after an I/O error.
        cache: keeps what was read, by the object's tag.
    """

    def __init__(self, retries: int = RETRIES, ahead_bytes: int = AHEAD_BYTES, cache: FileCache | None = None) -> None:
        self._retries, self._most, self._cache = retries, ahead_bytes, cache
        self._begun: OrderedDict[tuple[Url, int, int], _Slice] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def expect(self, ranges: Iterable[Range]) -> None:
        """Begin to read what will be asked for; what stands close together in one read."""
        with self._lock:
            new = {one[:3]: one for one in ranges if one[:3] not in self._begun and one[2] <= self._most}
            if self._cache is not None:
                new = {place: one for place, one in new.items() if not self._cache.has(_cache_key(*place, one[3].tag))}
            runs = [*_runs(new.values())]
            wanted = [
                (url, first, last + size - first, version.tag)
                for (url, first, _, version), (_, last, size, _) in ((run[0], run[-1]) for run in runs)
            ]
            for run, (url, first, _, _), future in zip(runs, wanted, start_reads(wanted), strict=True):
                for _, offset, size, _ in run:
                    while self._bytes + size > self._most:  # what was never asked for
                        self._bytes -= self._begun.popitem(last=False)[0][2]
                    self._begun[url, offset, size] = _Slice(future, offset - first, size)
                    self._bytes += size

    def read(self, url: Url, offset: int, size: int, version: ShardVersion | None) -> bytes:
        """`size` bytes at `offset`.

        Raises:
            ReadError: they cannot be read, after several tries.
            ShardError: the object is no longer the one that was indexed.
        """
        tag = version.tag if version is not None else ""

        def once() -> bytes:
            with self._lock:
                begun = self._begun.pop((url, offset, size), None)
                self._bytes -= size if begun is not None else 0
            try:
                content = (begun or start_read(url, offset, size, tag)).result()
            except Changed as error:
                raise changed(url) from error
            return bytes(_whole(url, content, size))

        what = f"{url}: cannot read {size} bytes at byte {offset}"
        if self._cache is None or not tag:  # without a tag nobody knows which content it was
            return retrying(once, what, self._retries)
        key = _cache_key(url, offset, size, tag)
        if (url, offset, size) not in self._begun:
            kept = self._cache.read(key)
            if kept is not None and len(kept) == size:
                return kept
        content = retrying(once, what, self._retries)
        self._cache.write(key, content)
        return content

    def close(self) -> None:
        """Forget what has begun."""
        with self._lock:
            self._begun.clear()
            self._bytes = 0


def _cache_key(url: Url, offset: int, size: int, tag: str) -> str:
    return f"{url}|{tag}|{offset}|{size}"


class _Slice(NamedTuple):
    """A part of what is being read."""

    whole: Future[memoryview]
    start: int
    size: int

    def result(self) -> memoryview:
        """Of an answer that is too short, less."""
        return self.whole.result()[self.start : self.start + self.size]


def _runs(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Ranges that are read together: of one object, with little between them."""
    run: list[Range] = []
    for one in sorted(ranges, key=lambda one: (one[0], one[1], one[2])):
        if run and (one[0] != run[0][0] or _apart(run, one)):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _apart(run: Sequence[Range], following: Range) -> bool:
    (_, first, _, version), (_, last, size, _) = run[0], run[-1]
    _, start, length, other = following
    return not 0 <= start - last - size <= _BETWEEN or start + length - first > _LONGEST or other != version


def changed(url: Url) -> ShardError:
    """The error of an object that is another one than was indexed."""
    return ShardError(
        f"{url}: the shard changed after it was indexed (it has another tag). Start the run again with shards that "
        "stay as they are."
    )


class WholeObject:
    """An object that is read from its beginning to its end, or in places far apart: for an index.

    Attributes:
        version: of the object; all that is read is of this one.

    Raises:
        ReadError, ShardError: see `RemoteReader.read`; also of the methods.
    """

    def __init__(self, url: Url, retries: int = RETRIES) -> None:
        self._url, self._retries = url, retries
        self._size, self._tag = url.seen or seen(url, retries)
        self._blocks: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._last = 0

    def is_same(self, version: ShardVersion) -> bool:
        """Whether this is the version of an index."""
        return (version.size, version.tag) == (self._size, self._tag)

    def look(self) -> ShardVersion:
        """The version, with a hash of samples of its content: the same as of a file with this content."""
        places = sampled(self._size)
        begun = start_reads([(self._url, at, length, self._tag) for at, length in places])
        blocks = [
            self._patiently(length, at, lambda one=one: one.result())  # type: ignore[misc]
            for one, (at, length) in zip(begun, places, strict=True)
        ]
        return ShardVersion(self._size, 0, 0, hash_of(self._size, blocks), self._tag)

    def read(self, length: int, offset: int) -> bytes:
        """What is at `offset`: `length` bytes, or fewer at the end. Small reads are served from blocks that come
        ahead."""
        length = max(min(length, self._size - offset), 0)
        if not length:
            return b""  # a damaged header may point to anywhere
        far, self._last = abs(offset - self._last) > _FAR, offset + length
        if length > _BLOCK or far:
            return bytes(self._patiently(length, offset))
        first, last = offset // _BLOCK, (offset + length - 1) // _BLOCK
        content = b"".join(bytes(self._block(number)) for number in range(first, last + 1))
        start = offset - first * _BLOCK
        return content[start : start + length]

    def _block(self, number: int) -> memoryview:
        end = -(-self._size // _BLOCK)
        for ahead in range(number, min(number + 1 + _BLOCKS_AHEAD, end)):
            if ahead not in self._blocks:
                self._blocks[ahead] = start_read(self._url, ahead * _BLOCK, self._length(ahead), self._tag)
        while len(self._blocks) > 2 * _BLOCKS_AHEAD:
            self._blocks.popitem(last=False)
        begun = self._blocks.get(number)
        return self._patiently(self._length(number), number * _BLOCK, begun.result if begun else None)

    def _length(self, block: int) -> int:
        return min(_BLOCK, self._size - block * _BLOCK)

    def _patiently(self, length: int, offset: int, begun: Callable[[], memoryview] | None = None) -> memoryview:
        """A range, first from a read that has begun."""
        first = [begun] if begun is not None else []

        def once() -> memoryview:
            try:
                content = first.pop()() if first else start_read(self._url, offset, length, self._tag).result()
            except Changed as error:
                raise changed(self._url) from error
            return _whole(self._url, content, length)

        return retrying(once, f"{self._url}: cannot read {length} bytes at byte {offset}", self._retries)


def seen(url: Url, retries: int = RETRIES) -> tuple[int, str]:
    """Size and tag of an object, asked for now. Raises ReadError."""
    found = retrying(lambda: store_of(url).look(url), f"{url}: cannot look at it", retries)
    return found.size, found.tag


def _whole(url: Url, content: memoryview, size: int) -> memoryview:
    if len(content) != size:
        raise OSError(errno.EIO, f"the answer has {len(content)} bytes of {size}", str(url))
    return content
