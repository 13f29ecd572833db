"""Locks that allow one run at a time per `run.dir` and per `checkpoint.dir` in object storage.

The holder writes a heartbeat into its lock every few seconds. A lock whose heartbeat has stopped is taken over.

`RunLock` also takes a POSIX lock, which the operating system frees when the process ends. Shared file systems (NFS,
Lustre with `flock`, GPFS) enforce it on all machines, and in-process restarts do not lock themselves out. Where the
file system enforces it on one machine only, or not at all, the heartbeats decide. `ObjectLock` writes an object only if
there is none, or, to take over, only if it is unchanged: of two simultaneous writers the storage rejects one.
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
from abc import ABC, abstractmethod
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
"""Seconds to wait for another machine's lock: NFS 4 leases of a machine that is gone last 90 s."""

BEAT = 10.0
"""Seconds between heartbeats."""

BEATS_MISSED = 4
"""Missed heartbeats after which a holder counts as dead; a machine that swaps may be late."""

_LARGEST = 4096
_CLOCK = 1.0
"""Resolution of object timestamps in seconds."""
_PROCESS = secrets.token_hex(8)
"""Identifies this process, which may retake its own lock: an in-process restart whose last attempt was aborted."""
_TRIES = 20
"""Attempts before giving up when other writers are faster."""


class _Lock(ABC):
    """Holder fields and heartbeat thread that both locks share.

    Args:
        key: `run.dir` or `checkpoint.dir`.
        beat: seconds between heartbeats.
        on_lost: called with a sentence when another process has taken over, or may have done so and ended. This needs
            several heartbeats that could not be written. Default: end the process.
    """

    _identity: tuple[str, ...]
    """Holder fields that identify this holder."""
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

    @abstractmethod
    def _show_life(self) -> str:
        """Write the heartbeat; return the reason if the lock is no longer this process's."""

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
    """Lock of a `run.dir`, held from construction to `close` or the end of the process."""

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
        """Take the lock. Without file locks it warns on stderr and relies on heartbeats.

        Args:
            patience: seconds to wait for a holder on another machine.
            mark: text in the file that identifies this run to its other ranks.

        Raises:
            UserError: another process holds it; names its host, process number and start time.
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
        """Free the lock; a second call has no effect."""
        with self._guard:
            if not self._ended.is_set():
                self._ended.set()
                with suppress(OSError):
                    if self._is_mine(self._holder()):
                        os.ftruncate(self._descriptor, 0)  # the next holder need not wait for a heartbeat
                os.close(self._descriptor)

    def _lock(self) -> bool:
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
        """Raise UserError if the holder in the file still writes heartbeats although the lock was granted."""
        holder = self._holder()
        here = holder.get("host") == self._me["host"]
        if not holder or (here and (self._is_locked or holder.get("pid") == self._me["pid"])):
            return
        with tempfile.TemporaryFile(dir=self._place) as now:  # the file server's clock
            now.write(b"now")
            now.flush()
            age = max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(self._descriptor).st_mtime)
        deadline = time.monotonic() + BEATS_MISSED * self._beat - age
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._beat))
            if self._holder() not in ({}, holder):
                raise UserError(self._in_use(holder))

    def _holder(self) -> dict[str, Any]:
        """Return the holder's fields; empty if the file is empty or unreadable."""
        return _fields(os.pread(self._descriptor, _LARGEST, 0))

    def _write(self) -> None:
        text = self._text()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    def _show_life(self) -> str:
        try:
            if not self._is_in_place():
                # Take a new lock: a removed file keeps no run out. If another run created its file first, only read it.
                os.close(self._descriptor)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
                self._lock()
            holder = self._holder()
            if holder and not self._is_mine(holder):
                return self._in_use(holder)
            self._write()
        except OSError:
            pass  # the file system does not answer: training continues
        return ""

    def _is_in_place(self) -> bool:
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
    """Lock of a `checkpoint.dir`, held from construction to `close` or the end of the process."""

    _identity = ("token",)

    def __init__(self, root: Url, mark: str = "", *, beat: float = BEAT, on_lost: Callable[[str], None] | None = None):
        """Take the lock; wait a few heartbeats if another holder may be alive.

        Args:
            mark: text in the lock that identifies this run to its other ranks.

        Raises:
            UserError: another process holds it (names host, process number and start time), or the storage is not
                writable.
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
        """Free the lock; a second call has no effect."""
        with self._guard:
            if self._ended.is_set():
                return
            self._ended.set()
            with suppress(OSError):  # then the next holder waits for a heartbeat
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
                continue  # another writer was faster
            except FileNotFoundError:
                if there is None:  # no such bucket; otherwise the holder has just ended
                    raise
        raise UserError(f"checkpoint.dir: {self._url} is written by others all the time")

    def _stands_still(self, holder: dict[str, Any], tag: str) -> bool:
        """True if the holder writes no heartbeat, False if the lock is gone. Raises UserError if it writes one."""
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
        """Write the heartbeat; return the reason if the lock is no longer this process's. Storage errors do not end
        training, and other errors do not end the heartbeats."""
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
        if there is None:  # somebody removed the lock
            self._store.put(self._url, self._text(), new=True)
            self._put_back = True
            there = self._there()
        if there is None:
            return ""
        if not self._is_mine(there[0]):
            return self._in_use(there[0])
        # Use the storage's clock: this machine's may have stopped with it.
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
        """Return (the holder's fields, the object's metadata); None if there is no lock.

        Raises:
            OSError: the storage does not answer.
        """
        for _ in range(_TRIES):
            try:
                found = self._store.look(self._url)
                return _fields(bytes(read_range(self._url, 0, min(found.size, _LARGEST), found.tag))), found
            except FileNotFoundError:
                return None
            except Changed:  # a heartbeat in between
                continue
        raise Changed(self._url)


def require_seen(root: Url, mark: str) -> None:
    """Require that this rank sees rank 0's lock.

    Raises:
        UserError: the lock is missing or does not contain `mark`: this rank's part of a checkpoint would be lost.
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
    """End this process at once: two runs in one folder mix their metrics and remove each other's checkpoints."""
    sys.stderr.write(f"error: {why}\n")
    sys.stderr.flush()
    os._exit(1)
