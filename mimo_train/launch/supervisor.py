"""A process beside the launcher that ends the ranks when it is gone: a rank that is stopped cannot end itself, and one
that waits for it does not either. Imports no torch.

    python -m mimo_train.launch.supervisor GRACE_SECONDS FOLDER

It reads from standard input what the launcher writes: `start PID START_TIME` for each rank, and `done`. An end of the
input without `done` says that the launcher is gone. Then the ranks, which know it too, have the grace to save.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mimo_train.flight.processes import kill_session, process, runs
from mimo_train.launch.import_guard import HOME


class Supervisor:
    """The launcher's side.

    Args:
        grace_seconds: how long ranks may take to save.
        folder: the launcher's temporary files.
    """

    def __init__(self, grace_seconds: float, folder: Path):
        places = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
        # In a session of its own: a signal to the launcher's group must not end it first.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mimo_train.launch.supervisor", f"{grace_seconds:g}", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": places},
            start_new_session=True,
            text=True,
        )

    def started(self, pids: Iterable[int]) -> None:
        """Ranks have started."""
        self._write("".join(f"start {pid} {found.start}\n" for pid in pids if (found := process(pid)) is not None))

    def close(self) -> None:
        """End it: the launcher has ended the ranks itself."""
        self._write("done\n")
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # it was killed: ranks that are not stopped look after themselves
            assert self._process.stdin is not None
            self._process.stdin.write(text)
            self._process.stdin.flush()


def main(grace_seconds: float, folder: Path, lines: Iterable[str]) -> None:
    """The process: reads `lines` until the launcher has ended."""
    ranks: list[tuple[int, int]] = []
    for line in lines:
        word, *numbers = line.split()
        if word == "done":
            return
        ranks.append((int(numbers[0]), int(numbers[1])))
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(runs(*rank) for rank in ranks):
        time.sleep(0.2)
    for pid, start in ranks:
        if runs(pid, start):
            with suppress(OSError):
                # Torchrun gives each rank a session: what it has started ends with it.
                kill_session(pid)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    main(float(sys.argv[1]), Path(sys.argv[2]), sys.stdin)
