"""One run at a time in a `run.dir`: a lock on a file in it, held by one process of the run.

The operating system holds the lock, and frees it when the process ends in whatever way, so that a job that was killed
does not keep the next one from starting. It is a POSIX lock: file systems that several machines share (NFS, Lustre with
`flock`, GPFS) know it everywhere, and in-process restarts do not lock themselves out.

Some know it on one machine alone, or not at all. So the holder writes into the file every few seconds: who comes from
another machine, or without a lock, sees that the file goes on changing, and is refused; one that has stood still is a
dead holder's, and is taken over.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from mimo_train.config.errors import UserError

LOCK_FILE = "lock"

LONGEST_LOCK = 120.0
"""Seconds to wait for a lock of another machine: a file server notices late that a machine has gone (the lease of
NFS 4 is 90 seconds)."""

BEAT = 10.0
"""Seconds from one sign of life to the next."""

BEATS_MISSED = 4
"""Signs of life that a holder leaves out before it is taken for dead; a machine that swaps may be late."""

_TAKEN = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """The lock of a `run.dir`, held from construction to `close` or the end of the process."""

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
            beat: seconds from one sign of life to the next.
            on_lost: called with a sentence when another process has taken the folder over, which can only be where
                locks are not known everywhere and this process stood still; default: the process ends.

        Raises:
            UserError: another process holds it; with its host, its number and since when.
            OSError: the file cannot be written.
        """
        self._path, self._run_dir, self._beat = run_dir / LOCK_FILE, run_dir, beat
        self._on_lost, self._ended, self._written = on_lost or end_process, threading.Event(), 0
        self._guard = threading.Lock()
        self._me: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid()}
        deadline = time.monotonic() + patience
        self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not self._taken():
                holder = self._holder()
                elsewhere = holder.get("host") not in (None, socket.gethostname())
                if not elsewhere or time.monotonic() >= deadline:
                    raise UserError(self._in_use(holder))
                time.sleep(min(5.0, patience))
            self._require_still()
            since = datetime.now(UTC).isoformat(timespec="seconds")
            self._me |= {"since": since, "mark": mark}
            self._write()
        except BaseException:
            self._close_file()
            raise
        threading.Thread(target=self._keep_beating, name="run lock", daemon=True).start()

    def close(self) -> None:
        """Free it; a second call has no effect."""
        self._ended.set()
        with self._guard:
            if self._descriptor is not None:
                try:
                    if self._is_mine(self._holder()):
                        os.ftruncate(self._descriptor, 0)  # the next one need not wait for a sign of life
                except OSError:
                    pass
                self._close_file()

    def _close_file(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _taken(self) -> bool:
        assert self._descriptor is not None
        self._is_locked = True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            self._is_locked = False
            sys.stderr.write(
                f"warning: run.dir: {self._path} cannot be locked ({error.strerror}): a second run in this folder is "
                f"noticed only by its signs of life, every {self._beat:g} seconds\n"
            )
        return True

    def _require_still(self) -> None:
        """Raises UserError if the one who stands in the file shows signs of life, though the lock was given."""
        holder = self._holder()
        here = holder.get("host") == self._me["host"]
        if not holder or (here and (self._is_locked or holder.get("pid") == self._me["pid"])):
            return
        longest = BEATS_MISSED * self._beat
        deadline = time.monotonic() + longest - self._age()
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._beat))
            if self._holder() not in ({}, holder):
                raise UserError(self._in_use(holder))

    def _age(self) -> float:
        """Seconds since the file was written, by the clock of the file server."""
        assert self._descriptor is not None
        with tempfile.TemporaryFile(dir=self._run_dir) as now:
            now.write(b"now")
            now.flush()
            return max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(self._descriptor).st_mtime)

    def _holder(self) -> dict[str, object]:
        """What the holder has written; empty if it has not yet, or the file is no longer readable."""
        assert self._descriptor is not None
        try:
            found = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self) -> None:
        assert self._descriptor is not None
        self._written += 1
        text = json.dumps({**self._me, "beat": self._written}).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    def _keep_beating(self) -> None:
        while not self._ended.wait(self._beat):
            with self._guard:
                if self._descriptor is None:
                    return
                try:
                    if not self._is_in_place():
                        self._put_in_place()
                    holder = self._holder()
                    if not holder or self._is_mine(holder):
                        self._write()
                        continue
                except OSError:
                    continue  # a file system that does not answer: training goes on
            self._on_lost(f"{self._in_use(holder)}; this process ends")
            return

    def _is_in_place(self) -> bool:
        """Whether the file that is locked still has its name: removed, it keeps no other run away."""
        assert self._descriptor is not None
        mine = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def _put_in_place(self) -> None:
        """Lock a new file in the place of a removed one; that of another run, if one was faster, is looked at only.

        Raises:
            OSError: the folder is not there.
        """
        before, self._descriptor = self._descriptor, os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        assert before is not None
        os.close(before)
        self._taken()

    def _is_mine(self, holder: dict[str, object]) -> bool:
        return all(holder.get(key) == self._me[key] for key in ("host", "pid"))

    def _in_use(self, holder: dict[str, object]) -> str:
        who = "another process"
        if holder:
            who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
        return (
            f"run.dir: {self._run_dir} is in use by {who}: wait until that run has ended, end it, or give another "
            f"run.dir (if its machine is gone, and the file server does not know it, remove {self._path})"
        )


def end_process(why: str) -> None:
    """Two runs in one folder mix their metrics and remove each other's checkpoints: this one ends at once."""
    sys.stderr.write(f"error: {why}\n")
    sys.stderr.flush()
    os._exit(1)
