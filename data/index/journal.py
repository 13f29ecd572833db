"""A journal of what was made one by one, so that work that is killed goes on where it was.

Each record is a head and a body with their lengths and a checksum. What stands behind the last whole record, of a write
that was cut, is written over. One process has a journal at a time; others wait, and then find what it has made.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xxhash import xxh3_64

from data.storage.files import READS

_log = logging.getLogger(__name__)

_FRAME = struct.Struct("<QQQ")  # bytes of the head, bytes of the body, checksum
_PAUSE, _TELL = 0.1, 60.0  # seconds between looks for the lock, and between messages about it
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM)


class Journal:
    """Records of an open journal, those that were there first."""

    def __init__(self, fd: int) -> None:
        self._fd, self._places, self._end = fd, list[tuple[int, int, int]](), 0
        size = os.fstat(fd).st_size
        while self._end + _FRAME.size <= size:
            head, body, check = _FRAME.unpack(os.pread(fd, _FRAME.size, self._end))
            place = self._end + _FRAME.size, head, body
            if place[0] + head + body > size or _check(*self._read(place)) != check:
                break
            self._places.append(place)
            self._end = place[0] + head + body

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> tuple[bytes, bytes]:
        """(head, body) of a record."""
        return self._read(self._places[number])

    def append(self, head: bytes, body: bytes | memoryview) -> None:
        """Raises OSError."""
        record = _FRAME.pack(len(head), len(body), _check(head, body)) + head + bytes(body)
        at = self._end
        for start in range(0, len(record), 1 << 30):  # the most that one call writes is 2 GiB
            at += os.pwrite(self._fd, record[start : start + (1 << 30)], at)
        if at != self._end + len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._places.append((self._end + _FRAME.size, len(head), len(body)))
        self._end = at

    def _read(self, place: tuple[int, int, int]) -> tuple[bytes, bytes]:
        at, head, body = place
        raw = b""
        while len(raw) < head + body:
            more = os.pread(self._fd, head + body - len(raw), at + len(raw))
            if not more:
                raise OSError(errno.EIO, "the journal became shorter")
            raw += more
        return raw[:head], raw[head:]


class Busy(Exception):
    """Another process has the journal."""


@contextmanager
def opened_journal(path: Path, *, wait: bool = True) -> Iterator[Journal]:
    """The journal at a path, for this process and thread alone; it is removed at the end of the block, but stays where
    the block raises. Where files cannot be locked, one of this block's own, that never stays.

    Raises:
        OSError: the folder cannot be written.
        Busy: another process has it, and this one is not to `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with READS.of(path):  # while it waits, a run goes on where the process that has the lock does
        fd, is_locked = _locked(path, wait)
    own = path
    if not is_locked:
        own = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        fd = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            yield Journal(fd)
        except BaseException:
            if not is_locked:
                own.unlink(missing_ok=True)
            raise
        own.unlink(missing_ok=True)
    finally:
        os.close(fd)


def remove_journal(path: Path, unused_seconds: float = 0.0) -> None:
    """Removes the journal at a path, unless a process has it, or has written it in the last `unused_seconds`. Where it
    cannot be removed it stays: it is in nobody's way."""
    try:
        if time.time() - path.stat().st_mtime < unused_seconds:
            return
        fd, is_locked = _locked(path, wait=False)
    except (OSError, Busy):
        return
    if is_locked:
        with suppress(OSError):
            path.unlink()
        os.close(fd)


def _locked(path: Path, wait: bool) -> tuple[int, bool]:
    """(descriptor of the journal, whether it is locked); (-1, False) where files cannot be locked.

    Waits for whoever has the lock, or raises Busy.
    """
    told = time.monotonic() - _TELL + 1
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if path.exists() and error.errno in (*_NO_LOCKS, errno.ENXIO, errno.EISDIR):
                return -1, False
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return -1, False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd, True
            os.close(fd)  # whoever had it has removed it
            continue
        except BlockingIOError:
            os.close(fd)
        except FileNotFoundError:
            os.close(fd)
            continue
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_LOCKS:
                return -1, False
            raise
        if not wait:
            raise Busy
        if time.monotonic() - told > _TELL:
            told = time.monotonic()
            _log.warning("%s: another process makes what it is for; this one waits", path)
        time.sleep(_PAUSE)


def _check(head: bytes, body: bytes | memoryview) -> int:
    digest = xxh3_64(head)
    digest.update(body)
    return digest.intdigest()
