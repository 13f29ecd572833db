"""A thread of every rank: it writes heartbeats, ends the rank without its launcher, and reports a hang."""

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from data.storage.files import READS
from mimo_train.flight.blame import ENDED, look, report
from mimo_train.flight.file_format import READING, REPORT
from mimo_train.flight.read import CLOCKS, Rank, descendants, process, runs, storage_bytes
from mimo_train.flight.recorder import Recorder

HANG_CODE = 18
"""Exit code of a run that was ended because it hung."""
LOOKERS = 4
"""Number of first ranks that read all others when nothing moves; later ranks do so only if none of these lives."""
BEAT = 0.5
"""Seconds between heartbeats."""
FOR_STACKS = 1.5
"""Seconds for the other ranks to write their stacks."""
UNSEEN = 10
"""Multiple of `run.hang_report_seconds` that a rank may work without a recorder event, in a compiler or library."""
BUSY = 0.5
"""Share of a CPU that counts as work, where waiting costs none."""
STORED = 2**20
"""Bytes from or to storage that count as work: more than this thread's own file takes."""
LAUNCHER = "MIMO_LAUNCHER"
"""Environment variable with the launcher's process id and start time."""


class Watch:
    """Watch one rank, from construction to `close`.

    Args:
        hang_seconds: `run.hang_report_seconds`; 0 turns reports off.
        ends: True to end a run that hangs.
        grace_seconds: seconds that the rank may take to save when its launcher is gone.
        launched: True if it has a launcher.
    """

    def __init__(
        self,
        recorder: Recorder,
        run_dir: Path,
        hang_seconds: float,
        *,
        ends: bool = True,
        grace_seconds: float = 120.0,
        launched: bool = True,
    ):
        self._recorder, self._run_dir, self._seconds, self._ends = recorder, run_dir, hang_seconds, ends
        self._grace = grace_seconds
        self._parent, self._launcher = (os.getppid(), handed_down()) if launched else (0, None)
        self._gone_since: float | None = None
        self._events = self._last_event = self._progress = -1.0
        self._activity: tuple[object, int, int] | None = None
        self._stacks_of, self._next_look = -1.0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="flight")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            # Keep watching if a file system fails or the interpreter shuts down.
            with suppress(Exception):
                self._look()

    def _look(self) -> None:
        now, recorder = time.monotonic(), self._recorder
        events = recorder.events + READS.count
        if events != self._events:
            self._events, self._last_event, self._progress = events, now, now
            self._activity = None
        elif recorder.rests:
            self._progress = now  # the caller may pause for any time
        elif self._works() and now - self._last_event < UNSEEN * self._seconds:
            self._progress = now
        recorder.note(READING, READS.longest())
        recorder.beat(self._progress)
        self._end_without_launcher(now)
        hangs = 0 < self._seconds <= now - self._progress and now >= self._next_look
        if hangs and recorder.folder is not None:
            self._report_hang(recorder.folder)

    def _works(self) -> bool:
        """True if this process has worked since the last call although the recorder has no event.

        Signs are: the main thread moves in its Python code, storage is read or written, a child process (a compiler)
        computes, or this process computes itself, unless waiting for a GPU takes CPU time.
        """
        frame, pid = sys._current_frames().get(threading.main_thread().ident or 0), os.getpid()
        place = (id(frame), frame.f_lasti) if frame is not None else None
        pids = [*descendants(pid)] + ([] if self._recorder.spins else [pid])
        ticks = sum(current.ticks for pid in pids if (current := process(pid)) is not None)
        before, self._activity = self._activity, (place, storage_bytes(pid), ticks)
        if before is None:
            return False
        computed = ticks - before[2] > BUSY * BEAT * os.sysconf("SC_CLK_TCK")
        return place != before[0] or self._activity[1] - before[1] > STORED or computed

    def _end_without_launcher(self, now: float) -> None:
        """Save and end without a launcher: the run that replaces this one must not find it still running."""
        if not self._parent:
            return
        if self._gone_since is None:
            if os.getppid() == self._parent and (self._launcher is None or runs(*self._launcher)):
                return
            self._gone_since = now
            say(
                f"rank {self._recorder.rank}: the launcher (process {(self._launcher or (self._parent,))[0]}) is gone: "
                f"this rank saves after its step and ends, within {self._grace:g} s (MIMO_GRACE_SECONDS)"
            )
            os.kill(os.getpid(), signal.SIGTERM)
        elif now - self._gone_since > self._grace:
            say(f"rank {self._recorder.rank}: did not end within {self._grace:g} s: ending it")
            # With its children, if torchrun has made it a session of its own.
            (os.killpg if os.getpgid(0) == os.getpid() else os.kill)(os.getpid(), signal.SIGKILL)

    def _report_hang(self, folder: Path) -> None:
        """Report and end the run if the ranks to blame have not moved for long enough either."""
        if self._stacks_of != self._events:
            self._stacks_of = self._events
            with suppress(OSError), open(self._recorder.stack_file() or os.devnull, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._sleep(FOR_STACKS)
        written, now = folder / REPORT, time.monotonic()
        if self._recorder.rank >= LOOKERS and self._is_looked_after(folder):
            if self._is_reported(written):
                self._leave()
            self._next_look = now + 2 * BEAT
            return
        verdict = look(folder, self._sleep, self._recorder.opened, self._beat)
        ages = [
            max(rank.now, rank.beat_at) - rank.progressed_at
            for number in verdict.blamed
            if (rank := verdict.ranks.get(number)) is not None
        ]
        # A rank that is waited for works, or began to hang later than this rank began to wait for it.
        remaining = self._seconds - min(ages, default=self._seconds) if verdict.blamed else self._seconds / 4
        if remaining > 0:
            self._next_look = time.monotonic() + max(remaining, 2 * BEAT)
            return
        self._next_look = time.monotonic() + self._seconds
        if not self._is_first(written):
            self._leave()
            return
        text = report(self._run_dir, verdict)
        with suppress(OSError):
            written.write_text(f"{text}\n{ENDED}\n" if self._ends else f"{text}\n")
        ends = f"; {ENDED}" if self._ends else ""
        say(f"no progress for {self._seconds:g} s (run.hang_report_seconds){ends}\n{text}")
        if self._ends:
            _end(HANG_CODE)

    def _is_first(self, written: Path) -> bool:
        """True if this rank is the first to reach a verdict; it reports."""
        with suppress(OSError):
            earlier = not self._ends and time.time() - written.stat().st_mtime > self._seconds
            if earlier or not self._is_reported(written):
                written.unlink()  # from an earlier hang or an earlier start
        try:
            written.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # the folder is gone or full: every rank reports
            return True
        return True

    def _is_reported(self, written: Path) -> bool:
        """True if there is a report of this start: an earlier start's is older than this rank's file."""
        try:
            return written.stat().st_mtime >= self._recorder.opened
        except OSError:
            return False

    def _leave(self) -> None:
        """End after the reporting rank, whose exit code the launcher returns; other machines return this one."""
        if self._ends:
            self._sleep(3.0)
            _end(HANG_CODE)

    @staticmethod
    def _is_looked_after(folder: Path) -> bool:
        """True if one of the first ranks lives and looks: thousands of readers would overload a file server."""
        first = (Rank.read(folder / f"rank_{number:05d}.bin") for number in range(LOOKERS))
        return any(rank is not None and rank.seen_at > time.time() - 2 * CLOCKS for rank in first)

    def _sleep(self, seconds: float) -> None:
        """Wait with heartbeats: other ranks must not take this rank for dead."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._beat()
            time.sleep(min(BEAT, left))

    def _beat(self) -> None:
        self._recorder.beat(self._progress)


def handed_down() -> tuple[int, int] | None:
    """Return the launcher's process id and start time from the environment; None if they are not set. The parent's id
    is not enough: this process has another parent if its launcher ends early."""
    try:
        pid, start = map(int, os.environ.get(LAUNCHER, "").split(":"))
    except ValueError:
        return None
    return pid, start


def hand_down() -> None:
    """Pass this process's id and start time to child processes."""
    this = process(os.getpid())
    if this is not None:
        os.environ[LAUNCHER] = f"{os.getpid()}:{this.start}"


def _end(code: int) -> None:
    """Exit at once: the main thread is stuck, and process groups would wait for the others."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line of mimo-train on standard error, if that still exists."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"mimo-train: {text}\n")
        sys.stderr.flush()
