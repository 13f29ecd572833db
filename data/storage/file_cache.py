"""A size-bounded, checksummed file cache, shared by any number of processes and runs.

It needs only atomic renames, so the folder may be on a network file system, where database locks are unreliable.
"""

import hashlib
import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path

_CHECKSUM_BYTES = 16
_LEAST, _SLACK = 0.8, 0.2
"""Share of the bound that removals leave, and share that may be written until the next removal."""


class FileCache:
    """Contents by key in a folder of at most `max_bytes`. Thread-safe.

    Counts `hits`, `misses` (damaged ones included), and `damaged` contents (wrong checksum, or dropped).
    """

    def __init__(self, folder: Path, max_bytes: int, *, suffix: str, what: str, writers: int = 1):
        """Open the cache. Raises OSError if the folder cannot be created.

        Args:
            what: the contents, for messages: "features".
            writers: processes that write at the same time; together they keep the bound.
        """
        self.hits = self.misses = self.damaged = 0
        self._folder, self._suffix, self._what = Path(folder), suffix, what
        self._least, self._slack = int(max_bytes * _LEAST), int(max_bytes * _SLACK / writers)
        self._written = 0
        self._gives_up = False
        self._lock, self._removing = threading.Lock(), threading.Lock()
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._make_room()
        except OSError as error:
            self._give_up(error)

    def read(self, key: str) -> bytes | None:
        """Return the content of a key; None if it is missing or damaged."""
        path = self._path(key)
        try:
            raw = path.read_bytes()
        except OSError:  # missing, just removed by another process, or a failing disk
            self._count("misses")
            return None
        with suppress(OSError):  # it may be another user's
            os.utime(path)
        checksum, content = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
        self._count("hits")
        if _checksum(content) != checksum:
            self.drop(key)
            return None
        return content

    def drop(self, key: str) -> None:
        """Remove a content that was read but is unusable."""
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)
        self._count("hits", -1)
        self._count("damaged")
        self._count("misses")

    def has(self, key: str) -> bool:
        """True if there is a file for this key now."""
        return os.path.exists(self._path(key))  # False without permission

    def write(self, key: str, content: bytes) -> None:
        """Store a content, unless another thread is removing files. A disk error disables writing with a warning."""
        size = len(content) + _CHECKSUM_BYTES
        if self._gives_up or size > self._slack:
            return
        path = self._path(key)
        partial = path.with_suffix(f".{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
        try:
            if not self._take(size):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_checksum(content) + content)
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._gives_up = True
        warnings.warn(f"{self._folder}: no more {self._what} are kept in this run: {error}", stacklevel=3)

    def _take(self, size: int) -> bool:
        """Reserve `size` bytes, after removing files if necessary. False while another thread removes files: scanning
        millions takes long, and nobody must wait for a cache."""
        with self._lock:
            fits = self._written + size <= self._slack
            self._written += size if fits else 0
        if fits or not self._removing.acquire(blocking=False):
            return fits
        try:
            self._make_room()
            self._written = size
        finally:
            self._removing.release()
        return True

    def _make_room(self) -> None:
        """Remove the least recently used files, as other processes may do at once. Raises OSError if that fails."""
        files = []
        for path in self._folder.glob("??/*"):
            with suppress(OSError):  # just removed by another process, or a failing disk
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in files) - self._least
        failed: OSError | None = None
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            try:
                path.unlink(missing_ok=True)
                excess -= size
            except OSError as error:
                failed = error
        if failed is not None and excess > 0:
            raise failed

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}{self._suffix}"

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + number)


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
