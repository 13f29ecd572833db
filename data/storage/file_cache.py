"""Bytes by key in the files of a folder, of at most so many bytes in all: checksummed, shared by any number of
processes and runs.

Files need only atomic renames, so the folder may be on a network file system, where database locks are unreliable.
A file is a BLAKE2b checksum followed by the content. It is written under another name and renamed; a read touches it,
and the files that were touched longest ago are removed first.
"""

import hashlib
import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path

_CHECKSUM_BYTES = 16
_LEAST, _SLACK = 0.8, 0.2
"""Share of the bound that is kept when files are removed, and share that may be written until the next removal."""
_FULL = 1 << 62
"""Bytes written since the last removal, while files are removed."""


class FileCache:
    """Contents by key in a folder of at most `max_bytes`. Methods may be called from several threads.

    Attributes:
        hits: contents found. misses: contents not found, damaged ones included. damaged: contents whose checksum was
            wrong, or that were dropped; they are removed.
    """

    def __init__(self, folder: Path, max_bytes: int, *, suffix: str, what: str, writers: int = 1):
        """
        Args:
            suffix: of the files.
            what: is kept, for messages: "features".
            writers: processes that write into the folder at the same time; together they keep the bound.

        Raises:
            OSError: the folder cannot be made.
        """
        self.hits = self.misses = self.damaged = 0
        self._folder, self._suffix, self._what = Path(folder), suffix, what
        self._least, self._slack = int(max_bytes * _LEAST), int(max_bytes * _SLACK / writers)
        self._written = 0
        self._gives_up = False
        self._lock = threading.Lock()
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._make_room()
        except OSError as error:
            self._give_up(error)

    def read(self, key: str) -> bytes | None:
        """The content of this key, or None."""
        path = self._path(key)
        try:
            raw = path.read_bytes()
        except OSError:  # missing, just removed by another process, or of a disk that fails
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
        """Remove a content that was read and cannot be used, whoever wrote it."""
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)
        self._count("hits", -1)
        self._count("damaged")
        self._count("misses")

    def has(self, key: str) -> bool:
        """Whether there is a file for this key, by now."""
        return os.path.exists(self._path(key))  # False for what this user may not look at

    def write(self, key: str, content: bytes) -> None:
        """Store a content under this key, unless another thread makes room just now. An error of the disk disables
        further writing with a warning; the run continues."""
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
        """Count what is about to be written, after making room where it is more than may be. False while another thread
        does so: a folder of millions of files takes long to look at, and nobody has to wait for a cache."""
        with self._lock:
            fits, is_full = self._written + size <= self._slack, self._written == _FULL
            self._written = self._written + size if fits else _FULL
        if fits or is_full:
            return fits
        self._make_room()
        with self._lock:
            self._written = size
        return True

    def _make_room(self) -> None:
        """Remove the least recently used files, down to a share of the bound. Several processes may do so at once: they
        find the same files to be the oldest.

        Raises:
            OSError: there is more than the bound, and it cannot be removed.
        """
        found = []
        for path in self._folder.glob("??/*"):
            with suppress(OSError):  # just removed by another process, or of a disk that fails
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        size = sum(entry[1] for entry in found)
        stays: OSError | None = None
        for _, of_file, path in sorted(found):
            if size <= self._least:
                break
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                stays = error
            else:
                size -= of_file
        if stays is not None and size > self._least:
            raise stays

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}{self._suffix}"

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + number)


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
