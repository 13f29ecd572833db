"""One run at a time in a `checkpoint.dir`: a lock in object storage, held by one process of the run.

The lock is an object that is written only if there is none, or, to take it over, only if it is still the one that was
seen: of two that try at the same time one is refused by the storage. Its holder writes it anew every few seconds. One
that has stood still is a dead holder's and is taken over, at once where this machine knows that the process is gone.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from data.storage.stores import read_range, store_of
from data.storage.url import Changed, ObjectMeta, Url
from mimo_train.config.errors import UserError
from mimo_train.launch.run_lock import BEAT, BEATS_MISSED, LOCK_FILE, end_process

_LARGEST = 4096
_CLOCK = 1.0
"""Seconds that times of objects are rounded to."""
_TRIES = 20
"""Times that another one may be faster."""


class ObjectLock:
    """The lock of a `checkpoint.dir`, held from construction to `close` or the end of the process."""

    def __init__(
        self,
        root: Url,
        mark: str = "",
        *,
        beat: float = BEAT,
        on_lost: Callable[[str], None] = end_process,
    ):
        """Take the lock; waits for a few beats where another holder may be alive.

        Args:
            root: the URL of `checkpoint.dir`.
            mark: written into the lock, for others of this run to find.
            beat: seconds from one sign of life to the next.
            on_lost: called with a sentence when another process has taken over, or may have and has ended since, which
                can only be when this one could not write for several beats; default: the process ends.

        Raises:
            UserError: another process holds it, with its host, its number and since when; or the storage cannot be
                written.
        """
        self._url, self._root, self._beat, self._on_lost = root / LOCK_FILE, root, beat, on_lost
        self._store, self._ended, self._guard = store_of(root), threading.Event(), threading.Lock()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._me = {**_this_process(), "since": since, "mark": mark, "token": secrets.token_hex(8)}
        self._beats, self._said = 0, ""
        self._seen_at, self._put_back = 0.0, False
        try:
            self._take()
            self._seen_at = self._store.look(self._url).modified
        except OSError as error:
            raise UserError(
                f"checkpoint.dir: {root} cannot be written ({error}): look at the URL, the endpoint and the "
                "credentials in the environment"
            ) from error
        self._thread = threading.Thread(target=self._keep_beating, name="checkpoint lock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free it; a second call has no effect."""
        with self._guard:
            if self._ended.is_set():
                return
            self._ended.set()
            try:
                there = self._there()
                if there is not None and self._is_mine(there[0]):
                    self._store.remove([self._url])
            except OSError:
                pass  # the next one waits for a sign of life

    def _take(self) -> None:
        for _ in range(_TRIES):
            there = self._there()
            try:
                if there is None:
                    self._store.put(self._url, self._text(), new=True)
                    return
                holder, tag = there[0], there[1].tag
                if _is_gone(holder) or self._stands_still(holder, tag):
                    self._store.put(self._url, self._text(), instead_of=tag)
                    return
            except (FileExistsError, Changed):
                continue  # another one was faster
            except FileNotFoundError:
                if there is None:  # no such bucket; else the holder has just ended
                    raise
        raise UserError(f"checkpoint.dir: {self._url} is written by others all the time")

    def _stands_still(self, holder: dict[str, Any], tag: str) -> bool:
        """Whether the one who stands in the lock shows no signs of life; False if the lock has gone. Raises UserError
        if it does."""
        longest = BEATS_MISSED * self._beat
        sys.stderr.write(
            f"checkpoint.dir: {self._root}: looking for up to {longest:g} seconds whether its last run is alive, "
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

    def _keep_beating(self) -> None:
        while not self._ended.wait(self._beat):
            with self._guard:
                if self._ended.is_set():
                    return
                why = self._show_life()
            if why:
                self._on_lost(f"{why}; this process ends")
                return

    def _show_life(self) -> str:
        """Write the lock anew; returns why it is no longer this process's, if so. A storage that does not answer does
        not end training, and no other error ends the signs of life."""
        try:
            return self._write_anew()
        except OSError:
            pass
        except Exception as error:
            said = f"checkpoint.dir: {self._root}: no sign of life was written: {type(error).__name__}: {error}\n"
            if said != self._said:  # once, not every few seconds
                sys.stderr.write(said)
            self._said = said
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
                f"checkpoint.dir: {self._root}: its lock was removed while this process showed no sign of life for "
                f"{silent:.0f} seconds, so that another run may have trained and saved there meanwhile"
            )
        self._seen_at, self._put_back = there[1].modified, False
        self._store.put(self._url, self._text(), instead_of=there[1].tag)
        return ""

    def _there(self) -> tuple[dict[str, Any], ObjectMeta] | None:
        """(what the holder has written, the object); None if there is no lock.

        Raises:
            OSError: the storage does not tell.
        """
        try:
            found, text = self._read()
        except FileNotFoundError:
            return None
        try:
            holder = json.loads(text)
        except ValueError:
            holder = {}
        return holder if isinstance(holder, dict) else {}, found

    def _read(self) -> tuple[ObjectMeta, bytes]:
        for _ in range(_TRIES):
            found = self._store.look(self._url)
            with suppress(Changed):  # by a sign of life, in between
                return found, bytes(read_range(self._url, 0, min(found.size, _LARGEST), found.tag))
        raise Changed(self._url)

    def _text(self) -> bytes:
        self._beats += 1
        return json.dumps({**self._me, "beat": self._beats}).encode()

    def _is_mine(self, holder: dict[str, Any]) -> bool:
        return holder.get("token") == self._me["token"]

    def _in_use(self, holder: dict[str, Any]) -> str:
        return (
            f"checkpoint.dir: {self._root} is in use by {_who(holder)}: wait until that run has ended, end it, or give "
            "another checkpoint.dir"
        )


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


def _this_process() -> dict[str, Any]:
    """What another process needs to see whether this one lives: its number counts among those of one namespace."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "space": _space(), "started": psutil.Process(pid).create_time()}


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # that of no other process


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether this machine knows that the holder has ended, or is this process."""
    pid, started = holder.get("pid"), holder.get("started")
    if holder.get("space") != _space() or not isinstance(pid, int) or not isinstance(started, float):
        return False
    if pid == os.getpid():
        return True
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - started) > 2
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # it may not be looked at, and lives
        return False


def _who(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
