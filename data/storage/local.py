"""Reading members of shards by position: one `pread` per member, from any thread."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from data.errors import ShardError
from data.reads_in_progress import READS
from data.storage.file_cache import FileCache
from data.storage.read_ahead import ReadAhead
from data.storage.remote import Range, RemoteReader
from data.storage.retry import RETRIES, retrying
from data.storage.url import Place, Url
from data.storage.version import ShardVersion, open_file
from data.storage.whole_read import pread_all

_OPEN_FILES = 128
_LOOK_AGAIN = 5.0  # seconds between looks at what stands at a path, besides that at the open file after each read


class ShardReader:
    """Reads byte ranges of shards; keeps some files open, the least recently used is closed first.

    Args:
        retries: `data.read_retries`: times that a read is tried again after an I/O error.
        cache: keeps what was read of remote shards.

    `bytes_read`: bytes read so far by extension, for accounting and for the proof that a rank reads only its members.
    `ahead`: whether it pays to announce ranges of files.
    """

    def __init__(
        self,
        retries: int = RETRIES,
        clock: Callable[[], float] = time.monotonic,
        cache: FileCache | None = None,
    ) -> None:
        self.bytes_read: dict[str, int] = Counter()
        self.ahead = ReadAhead()
        self._retries, self._clock = retries, clock
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._remote = RemoteReader(retries, cache=cache)
        self._confirmed: dict[Path, tuple[int, ShardVersion]] = {}  # inode, and the version as last seen there

    def read(self, path: Place, offset: int, size: int, extension: str, version: ShardVersion | None = None) -> bytes:
        """`size` bytes at `offset`.

        Args:
            version: that of the shard when it was indexed. It is compared when the file is opened and after every read,
                and every few seconds with the file that stands at `path` by then; of an object at every read.

        Raises:
            ReadError: the file cannot be read, after several tries.
            ShardError: it is not, or no longer, the one that was indexed, or ends early.
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
        """Begin to read what will be asked for: (place, first byte, bytes, version).

        Of files the system reads into its own memory what it does not have there. Raises nothing: what is wrong with a
        file, its read says.
        """
        remote: list[Range] = []
        for place, offset, size, version in ranges:
            if isinstance(place, Url):
                remote.append((place, offset, size, version))
                continue
            with suppress(OSError, ShardError), self._open(place, version) as fd:
                self.ahead.announce(fd, offset, size)
        self._remote.expect(remote)

    def close(self) -> None:
        """Closes the files that no thread is reading, and forgets what it expects."""
        self._close_files()
        self._remote.close()

    def _close_files(self) -> None:
        with self._lock:
            self._shrink(0)

    def _read(self, path: Path, offset: int, size: int, version: ShardVersion | None) -> bytes:
        try:
            with self._open(path, version) as fd:
                self.ahead.reads(fd, offset)
                raw = pread_all(fd, size, offset)
                if version is not None:
                    self._confirm(path, fd, version)
                if len(raw) < size:
                    raise ShardError(
                        f"{path}: only {len(raw)} of {size} bytes at byte {offset}: the shard is shorter than its "
                        "index. Copy or write the shard again."
                    )
                return raw
        except OSError:
            # The next try opens the file again, which a stale handle needs, with descriptors to spare.
            self._close_files()
            raise

    def _confirm(self, path: Path, fd: int, version: ShardVersion) -> None:
        """Raises ShardError unless the open file still has the content that was indexed."""
        found = os.fstat(fd)
        inode, seen = self._confirmed.get(path, (found.st_ino, version))
        if inode != found.st_ino:
            seen = replace(seen, ctime_ns=-1)  # another file may have been made at the same time
        now = seen.confirmed(fd, found)
        if now is None:
            was, is_now = (version.size, version.mtime_ns), (found.st_size, found.st_mtime_ns)
            said = f"{was[0]} bytes of {was[1]} ns, now {is_now[0]} of {is_now[1]}"
            if was == is_now:
                said = f"{was[0]} bytes as before, but with other content"
            raise ShardError(
                f"{path}: the shard changed after it was indexed ({said}). Start the run again with shards that stay "
                "as they are."
            )
        self._confirmed[path] = (found.st_ino, now)

    @contextmanager
    def _open(self, path: Path, version: ShardVersion | None) -> Iterator[int]:
        with self._lock:
            file = self._files.get(path)
            if file is not None and version is not None and self._clock() >= file.look_again:
                file.look_again = self._clock() + _LOOK_AGAIN
                if self._is_replaced(path, file):
                    del self._files[path]
                    if not file.users:
                        os.close(file.fd)
                    file.orphaned, file = True, None
            if file is None:
                file = self._opened(path, version)
            self._files.move_to_end(path)
            file.users += 1
            self._shrink(_OPEN_FILES)
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1
                if file.orphaned and not file.users:
                    os.close(file.fd)

    def _opened(self, path: Path, version: ShardVersion | None) -> _File:
        fd = open_file(path)
        try:
            if version is not None:
                self._confirm(path, fd, version)
            if hasattr(os, "posix_fadvise"):
                # Samples are read in random order: reading ahead would fetch neighbours that nobody needs.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            os.close(fd)
            raise
        file = self._files[path] = _File(fd, self._clock() + _LOOK_AGAIN)
        return file

    def _is_replaced(self, path: Path, file: _File) -> bool:
        """Whether another file stands at the path. One that is gone can still be read where it is open."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return False
        own = os.fstat(file.fd)
        return (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino)

    def _shrink(self, limit: int) -> None:
        above = len(self._files) - limit
        if above <= 0:
            return
        idle = [path for path, file in self._files.items() if file.users == 0]
        for path in idle[:above]:
            os.close(self._files.pop(path).fd)


class _File:
    """An open shard. `orphaned`: another one stands at its path, and its last user closes it."""

    def __init__(self, fd: int, look_again: float) -> None:
        self.fd, self.users, self.orphaned, self.look_again = fd, 0, False, look_again
