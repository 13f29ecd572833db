"""One run at a time in a `run.dir`: a lock on a file in it, held by one process of the run. Imports no torch.

The operating system holds the lock, and frees it when the process ends in whatever way, so that a job that was killed
does not keep the next one from starting. It is a POSIX lock: file systems that several machines share (NFS, Lustre with
`flock`, GPFS) know it everywhere, and in-process restarts do not lock themselves out. What stands in the file is for
the message alone.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from mimo_train.config.fault import UserError

LOCK_FILE = "lock"

PATIENCE = 120.0
"""Seconds to wait for a lock of another machine: a file server notices late that a machine has gone (the lease of
NFS 4 is 90 seconds)."""

_TAKEN = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """The lock of a `run.dir`, held from construction to `close` or the end of the process."""

    def __init__(self, run_dir: Path, patience: float = PATIENCE):
        """Take the lock. A file system without locks is reported on standard error, and the run goes on without one.

        Args:
            run_dir: exists.
            patience: seconds to wait for a holder on another machine.

        Raises:
            UserError: another process holds it; with its host, its number and since when.
            OSError: the file cannot be written.
        """
        path, deadline = run_dir / LOCK_FILE, time.monotonic() + patience
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not self._taken(path):
                holder = self._holder()
                elsewhere = holder.get("host") not in (None, socket.gethostname())
                if not elsewhere or time.monotonic() >= deadline:
                    raise UserError(_in_use(run_dir, path, holder))
                time.sleep(min(5.0, patience))
            self._write()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free it; a second call has no effect."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _taken(self, path: Path) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            sys.stderr.write(
                f"warning: run.dir: {path} cannot be locked ({error.strerror}): a second run in this folder would not "
                "be noticed\n"
            )
        return True

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
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)


def _in_use(run_dir: Path, path: Path, holder: dict[str, object]) -> str:
    who = "another process"
    if holder:
        who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
    return (
        f"run.dir: {run_dir} is in use by {who}: wait until that run has ended, end it, or give another run.dir (if "
        f"its machine is gone, and the file server does not know it, remove {path})"
    )
