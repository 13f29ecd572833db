"""One run at a time in a `run.dir`, and in a `checkpoint.dir` in object storage: locks of one process of the run.

Each holder writes a sign of life into its lock every few seconds. A lock that has stood still belongs to a dead holder
and is taken over.

`RunLock` is also a POSIX lock on the file, which the operating system frees when the process ends in any way. File
systems that several machines share (NFS, Lustre with `flock`, GPFS) know it everywhere, and in-process restarts do not
lock themselves out. Where a file system knows it on one machine only, or not at all, the signs of life decide.
`ObjectLock` is an object that is written only if there is none, or, to take it over, only if it is still the one that
was seen: of two that try at the same time the storage rejects one.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.storage.stores import read_range, store_of
from data.storage.url import Changed, ObjectMeta, Url
from mimo_train.config.errors import UserError

LOCK_FILE = "lock"

LONGEST_LOCK = 120.0
"""Seconds to wait for a lock of another machine: a file server notices late that a machine has gone (the lease of
NFS 4 is 90 seconds)."""

BEAT = 10.0
"""Seconds from one sign of life to the next."""

BEATS_MISSED = 4
"""Signs of life that a holder leaves out before it is taken for dead; a machine that swaps may be late."""

_LARGEST = 4096
_CLOCK = 1.0
"""Seconds that times of objects are rounded to."""
_PROCESS = secrets.token_hex(8)
"""This process, which may take its own lock again: an in-process restart whose last attempt was aborted."""
_TRIES = 20
"""Times that another one may be faster."""


class _Lock:
    """What both locks share: who holds them, and a thread that shows signs of life.

    Args:
        key: `run.dir` or `checkpoint.dir`.
        place: its value.
        beat: seconds from one sign of life to the next.
        on_lost: called with a sentence when another process has taken over, or may have and has ended since. That is
            possible only where this process could not write for several beats. Default: the process ends.
    """

    _identity: tuple[str, ...]
    """Fields of a holder that make it this one."""
    _remedy = ""

    def __init__(self, key: str, place: Any, beat: float, on_lost: Callable[[str], None] | None):
        self._key, self._place, self._beat, self._on_lost = key, place, beat, on_lost or end_process
        self._ended, self._guard, self._beats = threading.Event(), threading.Lock(), 0
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}

    def _keep_beating(self) -> None:
        while not self._ended.wait(self._beat):
            with self._guard:
                if self._ended.is_set():
                    return
                reason = self._show_life()
            if reason:
                self._on_lost(f"{reason}; this process ends")
                return

    def _show_life(self) -> str:
        """Write the lock anew; return why it is no longer this process's, if so."""
        raise NotImplementedError

    def _start_beating(self) -> None:
        threading.Thread(target=self._keep_beating, name=f"lock of {self._key}", daemon=True).start()

    def _text(self) -> bytes:
        self._beats += 1
        return json.dumps({**self._me, "beat": self._beats}).encode()

    def _is_mine(self, holder: dict[str, Any]) -> bool:
        return all(holder.get(field) == self._me[field] for field in self._identity)

    def _in_use(self, holder: dict[str, Any]) -> str:
        return (
            f"{self._key}: {self._place} is in use by {_who(holder)}: wait until that run has ended, end it, or give "
            f"another {self._key}{self._remedy}"
        )


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


class RunLock(_Lock):
    """The lock of a `run.dir`, held from construction to `close` or the end of the process."""

    _identity = ("host", "pid")

    def __init__(
        self,
        run_dir: Path,
        patience: float = LONGEST_LOCK,
        mark: str = "",
        *,
        beat: float = BEAT,
        on_lost: Callable[[str], None] | None = None,
    ):
        """Take the lock. A file system without locks is reported on standard error; signs of life take their place.

        Args:
            run_dir: exists.
            patience: seconds to wait for a holder on another machine.
            mark: written into the file, for others of this run to find.
            beat, on_lost: see `_Lock`.

        Raises:
            UserError: another process holds it; with its host, its number and since when.
            OSError: the file cannot be written.
        """
        super().__init__("run.dir", run_dir, beat, on_lost)
        self._path = run_dir / LOCK_FILE
        self._remedy = f" (if its machine is gone, and the file server does not know it, remove {self._path})"
        deadline = time.monotonic() + patience
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not self._lock():
                holder = self._holder()
                elsewhere = holder.get("host") not in (None, socket.gethostname())
                if not elsewhere or time.monotonic() >= deadline:
                    raise UserError(self._in_use(holder))
                time.sleep(min(5.0, patience))
            self._require_still()
            self._me |= {"since": self._since, "mark": mark}
            self._write()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._start_beating()

    def close(self) -> None:
        """Free it; a second call has no effect."""
        with self._guard:
            if not self._ended.is_set():
                self._ended.set()
                with suppress(OSError):
                    if self._is_mine(self._holder()):
                        os.ftruncate(self._descriptor, 0)  # the next one need not wait for a sign of life
                os.close(self._descriptor)

    def _lock(self) -> bool:
        """Return False if another process has the lock."""
        self._is_locked = True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            self._is_locked = False
            sys.stderr.write(
                f"warning: run.dir: {self._path} cannot be locked ({error.strerror}): a second run in this folder is "
                f"noticed only by its signs of life, every {self._beat:g} seconds\n"
            )
        return True

    def _require_still(self) -> None:
        """Raise UserError if the holder in the file shows signs of life, though the lock was given."""
        holder = self._holder()
        here = holder.get("host") == self._me["host"]
        if not holder or (here and (self._is_locked or holder.get("pid") == self._me["pid"])):
            return
        with tempfile.TemporaryFile(dir=self._place) as now:  # the clock of the file server
            now.write(b"now")
            now.flush()
            age = max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(self._descriptor).st_mtime)
        deadline = time.monotonic() + BEATS_MISSED * self._beat - age
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._beat))
            if self._holder() not in ({}, holder):
                raise UserError(self._in_use(holder))

    def _holder(self) -> dict[str, Any]:
        """Return what the holder has written; empty if it has not yet, or the file is no longer readable."""
        return _fields(os.pread(self._descriptor, _LARGEST, 0))

    def _write(self) -> None:
        text = self._text()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    def _show_life(self) -> str:
        try:
            if not self._is_in_place():
                # Removed, it keeps no other run away. A new file of another run, if one was faster, is only read.
                os.close(self._descriptor)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
                self._lock()
            holder = self._holder()
            if holder and not self._is_mine(holder):
                return self._in_use(holder)
            self._write()
        except OSError:
            pass  # a file system that does not answer: training goes on
        return ""

    def _is_in_place(self) -> bool:
        """True if the file that is locked still has its name."""
        mine = os.fstat(self._descriptor)
        try:
            current = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino)


def _fields(text: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


class ObjectLock(_Lock):
    """The lock of a `checkpoint.dir`, held from construction to `close` or the end of the process."""

    _identity = ("token",)

    def __init__(self, root: Url, mark: str = "", *, beat: float = BEAT, on_lost: Callable[[str], None] | None = None):
        """Take the lock; waits for a few beats where another holder may be alive.

        Args:
            root: the URL of `checkpoint.dir`.
            mark: written into the lock, for others of this run to find.
            beat, on_lost: see `_Lock`.

        Raises:
            UserError: another process holds it, with its host, its number and since when; or the storage cannot be
                written.
        """
        super().__init__("checkpoint.dir", root, beat, on_lost)
        self._url, self._store = root / LOCK_FILE, store_of(root)
        self._me |= {"since": self._since, "mark": mark, "token": secrets.token_hex(8), "process": _PROCESS}
        self._reported, self._seen_at, self._put_back = "", 0.0, False
        try:
            self._take()
            self._seen_at = self._store.look(self._url).modified
        except OSError as error:
            raise UserError(
                f"checkpoint.dir: {root} cannot be written ({error}): look at the URL, the endpoint and the "
                "credentials in the environment"
            ) from error
        self._start_beating()

    def close(self) -> None:
        """Free it; a second call has no effect."""
        with self._guard:
            if self._ended.is_set():
                return
            self._ended.set()
            with suppress(OSError):  # the next one waits for a sign of life
                there = self._there()
                if there is not None and self._is_mine(there[0]):
                    self._store.remove([self._url])

    def _take(self) -> None:
        for _ in range(_TRIES):
            there = self._there()
            try:
                if there is None:
                    self._store.put(self._url, self._text(), new=True)
                    return
                holder, tag = there[0], there[1].tag
                if holder.get("process") == _PROCESS or self._stands_still(holder, tag):
                    self._store.put(self._url, self._text(), instead_of=tag)
                    return
            except (FileExistsError, Changed):
                continue  # another one was faster
            except FileNotFoundError:
                if there is None:  # no such bucket; else the holder has just ended
                    raise
        raise UserError(f"checkpoint.dir: {self._url} is written by others all the time")

    def _stands_still(self, holder: dict[str, Any], tag: str) -> bool:
        """Return True if the holder shows no signs of life, False if the lock has gone.

        Raises:
            UserError: it shows one.
        """
        longest = BEATS_MISSED * self._beat
        sys.stderr.write(
            f"checkpoint.dir: {self._place}: looking for up to {longest:g} seconds whether its last run is alive, "
            f"{_who(holder)}\n"
        )
        deadline = time.monotonic() + longest
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._beat))
            there = self._there()
            if there is None:
                return False
            if there[1].tag != tag:
                raise UserError(self._in_use(there[0]))
        return True

    def _show_life(self) -> str:
        """Write the lock anew; return why it is no longer this process's, if so.

        A storage that does not answer does not end training, and no other error ends the signs of life.
        """
        try:
            return self._write_anew()
        except OSError:
            pass
        except Exception as error:
            warning = f"checkpoint.dir: {self._place}: no sign of life was written: {type(error).__name__}: {error}\n"
            if warning != self._reported:  # once, not every few seconds
                sys.stderr.write(warning)
            self._reported = warning
        return ""

    def _write_anew(self) -> str:
        there = self._there()
        if there is None:  # somebody has removed it: it keeps no other run away
            self._store.put(self._url, self._text(), new=True)
            self._put_back = True
            there = self._there()
        if there is None:
            return ""
        if not self._is_mine(there[0]):
            return self._in_use(there[0])
        # The storage's clock: that of this machine may have stood still together with it.
        silent = there[1].modified - self._seen_at
        if self._put_back and silent > BEATS_MISSED * self._beat + _CLOCK:
            return (
                f"checkpoint.dir: {self._place}: its lock was removed while this process showed no sign of life for "
                f"{silent:.0f} seconds, so that another run may have trained and saved there meanwhile"
            )
        self._seen_at, self._put_back = there[1].modified, False
        self._store.put(self._url, self._text(), instead_of=there[1].tag)
        return ""

    def _there(self) -> tuple[dict[str, Any], ObjectMeta] | None:
        """Return (what the holder has written, the object); None if there is no lock.

        Raises:
            OSError: the storage does not tell.
        """
        for _ in range(_TRIES):
            try:
                found = self._store.look(self._url)
                return _fields(bytes(read_range(self._url, 0, min(found.size, _LARGEST), found.tag))), found
            except FileNotFoundError:
                return None
            except Changed:  # by a sign of life, in between
                continue
        raise Changed(self._url)


def require_seen(root: Url, mark: str) -> None:
    """
    Raises:
        UserError: this rank does not see the lock of rank 0, with `mark` in it, so that its part of a checkpoint would
            be lost or could not be written.
    """
    why = "it is not there"
    try:
        found = store_of(root).look(root / LOCK_FILE)
        if mark in bytes(read_range(root / LOCK_FILE, 0, min(found.size, _LARGEST))).decode(errors="replace"):
            return
    except OSError as error:
        why = str(error)
    raise UserError(
        f"checkpoint.dir: rank {os.environ.get('RANK', '0')} on {socket.gethostname()} does not see what rank 0 has "
        f"written to {root / LOCK_FILE} ({why}): all ranks need the same storage, endpoint and credentials"
    )


def end_process(why: str) -> None:
    """Two runs in one folder mix their metrics and remove each other's checkpoints: this one ends at once."""
    sys.stderr.write(f"error: {why}\n")
    sys.stderr.flush()
    os._exit(1)
