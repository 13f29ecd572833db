"""Locks that allow one run at a time per `run.dir` and per `checkpoint.dir` in object storage.

The holder writes a heartbeat into its lock every few seconds. A lock whose heartbeat has stopped is taken over.

`RunLock` also takes a lock of the file system (`flock`), which is free as soon as the process ends. Where the file
system enforces it on one machine only, or not at all, the heartbeats decide. `ObjectLock` writes an object only if
there is none, or, to take over, only if it is unchanged: of two simultaneous writers the storage rejects one.
"""

import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.storage.object_store import read_range, store_of
from data.storage.url import Changed, Url
from mimo_train.config.errors import UserError

LOCK_FILE = "lock"

LONGEST_LOCK = 120.0
"""Seconds to wait for another machine's lock: NFS 4 leases of a machine that is gone last 90 s."""

BEAT = 10.0
"""Seconds between heartbeats."""

BEATS_MISSED = 4
"""Missed heartbeats after which a holder counts as dead; a machine that swaps may be late."""

_LARGEST = 4096
_TRIES = 20
"""Attempts before giving up when other writers are faster."""

Holder = dict[str, Any]
"""Fields of a lock: host, pid, since, mark and beat; empty if it cannot be read."""


class _Lock(ABC):
    """Holder and heartbeats, which both locks share. Held until `close`, or until the object is gone.

    Args:
        key: `run.dir` or `checkpoint.dir`.
        place: its value.
        mark: text that identifies this run to its other ranks; default: a random one.
        beat: seconds between heartbeats.
        on_lost: called with a sentence when this lock is no longer this process's. This needs several heartbeats that
            could not be written, or a user who removes the lock. Default: end the process.
    """

    def __init__(self, key: str, place: Any, mark: str, beat: float, on_lost: Callable[[str], None] | None):
        self._key, self._place, self._beat, self._on_lost = key, place, beat, on_lost or end_process
        self._remedy = ""
        self._me: Holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "mark": mark or secrets.token_hex(8),
            "beat": 0,
        }
        self._ended, self._guard = threading.Event(), threading.Lock()

    def close(self) -> None:
        """Free the lock; a second call has no effect."""
        with self._guard:
            if not self._ended.is_set():
                self._ended.set()
                with suppress(OSError):  # then the next holder waits for a heartbeat
                    self._free()

    @abstractmethod
    def _free(self) -> None:
        """Free the lock, and leave another process's as it is."""

    @abstractmethod
    def _read(self) -> tuple[Holder, str] | None:
        """Return the holder and a version that each heartbeat changes; None if there is no lock."""

    @abstractmethod
    def _show_life(self) -> str:
        """Write a heartbeat; return the reason if the lock is no longer this process's."""

    def _start_beating(self) -> None:
        arguments = weakref.ref(self), self._ended, self._beat
        threading.Thread(target=_keep_beating, args=arguments, name=f"lock of {self._key}", daemon=True).start()

    def _text(self) -> bytes:
        self._me["beat"] += 1
        return json.dumps(self._me).encode()

    def _is_mine(self, holder: Holder) -> bool:
        return holder.get("mark") == self._me["mark"]

    def _wait_for_a_heartbeat(self, holder: Holder, version: str) -> None:
        """Return if the holder writes no heartbeat, or the lock is gone. Raises UserError if it writes one."""
        deadline = time.monotonic() + BEATS_MISSED * self._beat
        sys.stderr.write(
            f"{self._key}: {self._place}: looking for up to {BEATS_MISSED * self._beat:g} seconds whether its last run "
            f"is alive, {_name(holder)}\n"
        )
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._beat))
            current = self._read()
            if current is None:
                return
            if current[1] != version:
                raise UserError(self._in_use(current[0]))

    def _in_use(self, holder: Holder) -> str:
        return (
            f"{self._key}: {self._place} is in use by {_name(holder)}: wait until that run has ended, end it, or give "
            f"another {self._key}{self._remedy}"
        )


def _keep_beating(lock_of: "weakref.ref[_Lock]", ended: threading.Event, beat: float) -> None:
    while not ended.wait(beat):
        lock = lock_of()
        if lock is None:  # an in-process restart has dropped it
            return
        reason = ""
        # Training continues if the storage does not answer, and after an error of another kind the next heartbeat too.
        with lock._guard, suppress(Exception):
            if not ended.is_set():
                reason = lock._show_life()
        if reason:
            lock._on_lost(f"{reason}; this process ends")
            return
        del lock


def _name(holder: Holder) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _holder(text: bytes) -> Holder:
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


class RunLock(_Lock):
    """Lock of a `run.dir`."""

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
            mark, beat, on_lost: see `_Lock`.

        Raises:
            UserError: another process or lock of this one holds it; names its host, process number and start time.
            OSError: the file cannot be written.
        """
        super().__init__("run.dir", run_dir, mark, beat, on_lost)
        self._path = run_dir / LOCK_FILE
        self._remedy = f" (if its machine is gone, and the file server does not know it, remove {self._path})"
        deadline = time.monotonic() + patience
        self._open()
        while not self._lock():
            holder = self._read()[0]
            if holder.get("host", self._me["host"]) == self._me["host"] or time.monotonic() >= deadline:
                self._file.close()
                raise UserError(self._in_use(holder))
            time.sleep(min(5.0, patience))
        holder, version = self._read()
        if holder and not (self._is_locked and holder.get("host") == self._me["host"]):
            self._wait_for_a_heartbeat(holder, version)
        self._write()
        self._start_beating()

    def _open(self) -> None:
        self._path.touch()
        self._file = open(self._path, "r+b", buffering=0)

    def _lock(self) -> bool:
        """Return False if another process has the lock; without locks on this file system True, and warn."""
        self._is_locked = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self._is_locked = False
            sys.stderr.write(
                f"warning: run.dir: {self._path} cannot be locked ({error.strerror}): a second run in this folder is "
                f"noticed only by its heartbeats, every {self._beat:g} seconds\n"
            )
        return True

    def _read(self) -> tuple[Holder, str]:
        text = self._path.read_bytes()  # by its name, under which another run may have put a file of its own
        return _holder(text), text.decode(errors="replace")

    def _write(self) -> None:
        text = self._text()
        os.pwrite(self._file.fileno(), text, 0)
        self._file.truncate(len(text))

    def _show_life(self) -> str:
        if not self._path.exists():  # a removed file keeps no run out
            self._file.close()
            self._open()
            self._lock()
        holder, _ = self._read()
        if holder and not self._is_mine(holder):
            return self._in_use(holder)
        self._write()
        return ""

    def _free(self) -> None:
        try:
            if self._is_mine(self._read()[0]):
                self._file.truncate(0)  # the next holder need not wait for a heartbeat
        finally:
            with self._file, suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing it is not enough if a forked process has it open


class ObjectLock(_Lock):
    """Lock of a `checkpoint.dir` in object storage."""

    def __init__(self, root: Url, mark: str = "", *, beat: float = BEAT, on_lost: Callable[[str], None] | None = None):
        """Take the lock; wait a few heartbeats if another holder may be alive.

        Args:
            mark, beat, on_lost: see `_Lock`.

        Raises:
            UserError: another process holds it (names host, process number and start time), or the storage is not
                writable.
        """
        super().__init__("checkpoint.dir", root, mark, beat, on_lost)
        self._url, self._store = root / LOCK_FILE, store_of(root)
        try:
            self._take()
        except OSError as error:
            raise UserError(
                f"checkpoint.dir: {root} cannot be written ({error}): look at the URL, the endpoint and the "
                "credentials in the environment"
            ) from error
        self._start_beating()

    def _take(self) -> None:
        for _ in range(_TRIES):
            current = self._read()
            try:
                if current is None:
                    self._store.put(self._url, self._text(), new=True)
                else:
                    self._wait_for_a_heartbeat(*current)
                    self._store.put(self._url, self._text(), instead_of=current[1])
                return
            except (FileExistsError, Changed):
                continue  # another writer was faster
            except FileNotFoundError:
                if current is None:  # no such bucket; otherwise the holder has just ended
                    raise
        raise UserError(f"checkpoint.dir: {self._url} is written by others all the time")

    def _read(self) -> tuple[Holder, str] | None:
        for _ in range(_TRIES):
            try:
                meta = self._store.look(self._url)
                text = bytes(read_range(self._url, 0, min(meta.size, _LARGEST), meta.tag))
                return _holder(text), meta.tag
            except FileNotFoundError:
                return None
            except Changed:  # a heartbeat in between
                continue
        raise Changed(self._url)

    def _show_life(self) -> str:
        current = self._read()
        if current is None:
            return f"checkpoint.dir: {self._url} was removed: another run may have saved there meanwhile"
        if not self._is_mine(current[0]):
            return self._in_use(current[0])
        self._store.put(self._url, self._text(), instead_of=current[1])
        return ""

    def _free(self) -> None:
        current = self._read()
        if current is not None and self._is_mine(current[0]):
            self._store.remove([self._url])


def require_seen(root: Url, mark: str) -> None:
    """Require that this rank sees rank 0's lock.

    Raises:
        UserError: the lock is missing or does not contain `mark`: this rank's part of a checkpoint would be lost.
    """
    reason = "it is not there"
    try:
        meta = store_of(root).look(root / LOCK_FILE)
        if mark in bytes(read_range(root / LOCK_FILE, 0, min(meta.size, _LARGEST))).decode(errors="replace"):
            return
    except OSError as error:
        reason = str(error)
    raise UserError(
        f"checkpoint.dir: rank {os.environ.get('RANK', '0')} on {socket.gethostname()} does not see what rank 0 has "
        f"written to {root / LOCK_FILE} ({reason}): all ranks need the same storage, endpoint and credentials"
    )


def end_process(reason: str) -> None:
    """End this process at once: two runs in one folder mix their metrics and remove each other's checkpoints."""
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    os._exit(1)
