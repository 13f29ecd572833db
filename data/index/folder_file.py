"""Find, complete and save the file about the shards of one folder (`index_file`).

A lock keeps processes from making the same parts; without file locks, each makes its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.index.index_file import IndexFile, Located, Part, load_file, write_file
from data.storage.files import READS, ShardVersion, cannot_write
from data.storage.url import Place, Url, place_of

_log = logging.getLogger(__name__)

SAVE_SECONDS, SAVE_SHARE = 30.0, 0.05
"""Seconds of work between saves, extended so that saving takes at most this share."""
_POLL_SECONDS, _LOG_SECONDS = 0.1, 60.0  # between tries to take a lock, and between messages about it


class FolderFile:
    """The file about the shards of one folder: next to them, in `data.cache_dir`, or in the user's cache.

    `located` has the shards' parts after `load`. `what` names the file in messages. `checks_all` verifies all parts.
    """

    def __init__(
        self,
        shards: Sequence[Place],
        cache_dir: str | os.PathLike[str] | None,
        suffix: str,
        what: str,
        *,
        checks_all: bool = False,
    ) -> None:
        self._names = [shard.name for shard in shards]
        self._folder = shards[0].parent
        self.path = catalogue_path(shards[0], cache_dir, writable=True, suffix=suffix)
        self._paths = list(dict.fromkeys([catalogue_path(shards[0], cache_dir, suffix=suffix), self.path]))
        self._what, self._checks_all = what, checks_all
        self.located = Located.none(len(shards))

    def load(self, current: Callable[[IndexFile, np.ndarray, np.ndarray], np.ndarray]) -> None:
        """Locate parts. `current`: (file, rows of all shards in it, candidate shards) -> current candidates."""
        located = Located.none(len(self._names))
        for file in self._files():
            rows = file.rows_of(self._names)
            which = current(file, rows, np.flatnonzero(located.missing & (rows >= 0)))
            if len(which) and (file.is_small or self._checks_all) and not file.is_intact():
                is_good = [file.is_part_intact(int(rows[shard])) for shard in which]
                for shard in which[np.logical_not(is_good)].tolist():
                    _log.warning("%s: damaged (%s of %s), made again", file.path, self._what, self._names[shard])
                which = which[is_good]
            located.take(file, rows, which)
        self.located = located

    def save(self, parts: Mapping[str, Part], versions: Mapping[str, ShardVersion]) -> None:
        """Save new parts, updated versions, and the existing parts of all existing shards. Raises DataError."""
        kept, wanted = dict(parts), set(self._names)
        for file in self._files():
            for name, row in file.row_of.items():
                if name in kept or not file.is_part_intact(row):
                    continue
                if name in wanted or (file.path == self.path and self._exists(name)):
                    part = file.part(row)
                    kept[name] = replace(part, version=versions[name]) if name in versions else part
        write_file(self.path, [*kept.values()], self._what)

    @contextmanager
    def lock(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock that keeps other processes from making the same parts. Raises Busy, DataError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            path = self.path.with_name(self.path.name + ".lock")
            with READS.of(path):  # a run continues when the process with the lock does
                fd = _locked(path, wait)
        except OSError as error:
            raise cannot_write(self._what, self.path, error) from error
        try:
            yield
        finally:
            if fd >= 0:
                path.unlink(missing_ok=True)
                os.close(fd)

    def _files(self) -> list[IndexFile]:
        return [file for path in self._paths if (file := load_file(path, self._what)) is not None]

    def _exists(self, name: str) -> bool:
        """True if another shard of the folder exists or may exist."""
        return not isinstance(self._folder, Path) or (self._folder / name).exists()


class SaveTimer:
    """Decides when to save."""

    def __init__(self) -> None:
        self._saved, self._seconds = time.monotonic(), SAVE_SECONDS

    def is_due(self) -> bool:
        return time.monotonic() - self._saved >= self._seconds

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a block that saves."""
        started = time.monotonic()
        yield
        self._saved = time.monotonic()
        self._seconds = max(SAVE_SECONDS, (self._saved - started) / SAVE_SHARE)


class Busy(Exception):
    """Another process has the lock."""


def _locked(path: Path, wait: bool) -> int:
    """Take the lock file at a path and return its descriptor, or -1 if files cannot be locked."""
    logged = time.monotonic() - _LOG_SECONDS + 1
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError:
            if path.exists():  # another user's, or not a file
                return -1
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        except FileNotFoundError:  # the previous owner removed it
            pass
        except BlockingIOError:
            if not wait:
                os.close(fd)
                raise Busy from None
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                _log.warning("%s: waiting for another process that makes %s", path, path.stem)
            time.sleep(_POLL_SECONDS)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            return -1
        os.close(fd)


def by_folder(shards: Sequence[Place]) -> list[list[int]]:
    """Group shard numbers by folder, in order of first occurrence."""
    numbers: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(str(shard).rpartition("/")[0], []).append(number)
    return [*numbers.values()]


def catalogue_path(
    shard: str | os.PathLike[str] | Url,
    cache_dir: str | os.PathLike[str] | None = None,
    writable: bool = False,
    suffix: str = ".mimo-catalogue",
) -> Path:
    """Return the path of a folder's catalogue, or of another file about its shards. It is next to the shards, or in
    `cache_dir` if given. URLs use the user's cache folder. With `writable`, so do folders without write permission."""
    shard = place_of(shard)
    folder = shard.absolute().parent
    if cache_dir is not None:
        kept = cache_folder(cache_dir)
    elif not isinstance(folder, Path) or (writable and not os.access(folder, os.W_OK)):
        kept = cache_folder(None) / "index"
    else:
        return folder / f"shards{suffix}"
    # The hash distinguishes folders with the same name.
    place = hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:12]
    return kept / f"{folder.name}.{place}{suffix}"


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return `cache_dir`, or the user's cache. Raises DataError without a home folder."""
    try:
        if cache_dir is not None:
            return Path(cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-train"
    except RuntimeError as error:
        raise DataError(
            f"data.cache_dir: {cache_dir or 'is empty'}, and this user has no home folder (HOME): set it to a folder "
            "that can be written"
        ) from error
