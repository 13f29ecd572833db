"""Reading members of shards by position: one `pread` per member, from any thread."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import ReadError, ShardError
from data.reading import READS

_OPEN_FILES = 128


class ShardReader:
    """Reads byte ranges of shards; keeps some files open, the least recently used is closed first.

    `bytes_read`: bytes read so far by extension, for accounting and for the proof that a rank reads only its members.
    """

    def __init__(self) -> None:
        self.bytes_read: dict[str, int] = Counter()
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, _File] = OrderedDict()

    def read(self, path: Path, offset: int, size: int, extension: str, stamp: tuple[int, int] | None = None) -> bytes:
        """`size` bytes at `offset`. `stamp`: (size, mtime_ns) that the shard had when it was indexed, checked on
        opening.

        Raises ReadError if the file cannot be read or ends early, ShardError if it is not the one that was indexed.
        """
        try:
            with READS.of(path), self._open(path, stamp) as fd:
                raw = os.pread(fd, size, offset)
                while len(raw) < size:  # signals and sizes over 2 GiB cut a read short
                    more = os.pread(fd, size - len(raw), offset + len(raw))
                    if not more:
                        raise ReadError(
                            f"only {len(raw)} of {size} bytes at byte {offset}: the shard is shorter than its index"
                        )
                    raw += more
        except OSError as error:
            raise ReadError(f"cannot read {size} bytes at byte {offset}: {error.strerror or error}") from error
        with self._lock:
            self.bytes_read[extension] += len(raw)
        return raw

    def close(self) -> None:
        """Closes the files that no thread is reading."""
        with self._lock:
            self._shrink(0)

    @contextmanager
    def _open(self, path: Path, stamp: tuple[int, int] | None) -> Iterator[int]:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _File(path, stamp)
            self._files.move_to_end(path)
            file.users += 1
            self._shrink(_OPEN_FILES)
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1

    def _shrink(self, limit: int) -> None:
        idle = [path for path, file in self._files.items() if file.users == 0]
        for path in idle[: max(len(self._files) - limit, 0)]:
            os.close(self._files.pop(path).fd)


class _File:
    def __init__(self, path: Path, stamp: tuple[int, int] | None) -> None:
        self.users = 0
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        stat = os.fstat(self.fd)
        if stamp is not None and stamp != (stat.st_size, stat.st_mtime_ns):
            os.close(self.fd)
            raise ShardError(
                f"{path}: the shard changed after it was indexed. Start the run again with shards that stay as they "
                "are."
            )
        if hasattr(os, "posix_fadvise"):
            # Samples are read in random order: reading ahead would fetch neighbours that nobody needs.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
