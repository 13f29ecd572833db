"""Restarts of a run by its launcher: how often, after which time, and when another one would be of no use. Imports no
torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.flight.read import read_ranks
from mimo_train.launch.shutdown import seconds_of
from mimo_train.launch.temp_dir import FLIGHT

OPTION = "--max-restarts"
RESTART = "MIMO_RESTART"
"""Environment variable of the ranks: which restart this is, from 1; not set at the first start."""
RESTARTS = "MIMO_RESTARTS"
"""Environment variable of the ranks: how often this launcher starts them again; not set where it never does. (What a
user sets for scripts/launch.sh is MIMO_MAX_RESTARTS.)"""
STOPPED_CODE = "MIMO_STOPPED_CODE"
"""Environment variable of the ranks, set where whoever has started them starts an unfinished run again: the exit code
of one that was stopped and has saved. Kubernetes counts a pod that exits with 0 as done."""
LONGEST_WAIT = 300.0
ANOTHER_MACHINE = 16
"""Exit code of `train.rerun` that wants another machine."""
LARGEST_CODE = 255


@dataclass(frozen=True)
class Failure:
    """What an attempt ended with."""

    code: int
    """Exit code of the rank that failed first; negative: the signal that ended it."""
    step: int
    """The furthest step that a rank had begun; -1 where the run had not begun."""
    error: str = ""
    """The first rank's own error."""

    def __str__(self) -> str:
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        where = f"at step {self.step}" if self.step > 0 else "in set-up"
        return f"{how} {where}" + (f" ({self.error})" if self.error else "")


def failure_of(code: int, scratch: Path) -> Failure:
    """What the ranks' files say about a failure.

    Args:
        scratch: the launcher's folder, in which ranks have left where their files are.
    """
    folder = _flight_folder(scratch)
    return Failure(code, -1) if folder is None else failure_in(folder, code)


def failure_in(folder: Path, code: int) -> Failure:
    """What the ranks' files of one start say about a failure.

    Args:
        folder: as of `newest_start`.
    """
    ranks = read_ranks(folder)
    errors = sorted((rank.seen_at, rank.error) for rank in ranks.values() if rank.error)
    step = max((rank.step for rank in ranks.values()), default=-1)
    return Failure(code, step, errors[0][1] if errors else "")


def run_dir_of(scratch: Path) -> Path | None:
    """`run.dir` of the ranks, if they have begun; arguments as of `failure_of`."""
    folder = _flight_folder(scratch)
    return folder.parent.parent if folder is not None else None


def _flight_folder(scratch: Path) -> Path | None:
    try:
        return Path((scratch / FLIGHT).read_text())
    except OSError:
        return None


class Restarts:
    """Decides after each failure.

    Args:
        number: `--max-restarts`, above 0 where a failure is given to `after`.
        first_wait: seconds before the first restart; each later one waits twice as long, at most LONGEST_WAIT.
    """

    def __init__(self, number: int, first_wait: float):
        self.number, self._first_wait = number, first_wait
        self._failures: list[Failure] = []

    @property
    def made(self) -> int:
        """Restarts so far."""
        return len(self._failures)

    def after(self, failure: Failure) -> tuple[float | None, str]:
        """Seconds to wait before the next start, or None for the end; and why, in words."""
        before = self._failures[-1] if self._failures else None
        if failure.step < 0:
            return None, "not started again: the run had not begun"
        if failure.code == ANOTHER_MACHINE:
            return None, "not started again here"
        if failure.code == stopped_code():
            return None, f"not started again here: exit code {failure.code} ({STOPPED_CODE}) is that of a stop"
        if failure == before:
            return None, f"not started again: the same failure twice, {failure}"
        if self.made >= self.number:
            return None, f"not started again: {self.made} of {self.number} restarts ({OPTION}) were made; {failure}"
        self._failures.append(failure)
        seconds = min(LONGEST_WAIT, self._first_wait * 2 ** (self.made - 1))
        return seconds, f"{failure}; restart {self.made} of {self.number} in {seconds:g} s, from the newest checkpoint"


def first_wait() -> float:
    """MIMO_RESTART_SECONDS: seconds before the first restart; 5 where it is not set.

    Raises:
        UserError: it is not a number from 0 on.
    """
    return seconds_of("MIMO_RESTART_SECONDS", 5.0, or_none=True)


def require_resume(resume: str, why: str = "") -> None:
    """
    Args:
        resume: `checkpoint.resume`.
        why: what starts the run again; without it, what the environment says.

    Raises:
        ConfigError: the run may be started again, which would not continue from its newest checkpoint.
    """
    if number := os.environ.get(RESTARTS):
        why = why or f"{OPTION} {number}"
    elif STOPPED_CODE in os.environ:
        why = why or f"{STOPPED_CODE} {stopped_code()}"
    if why and resume != "auto":
        text = f"must be auto with {why}, is {resume!r}: a run that starts again continues from its newest checkpoint"
        raise ConfigError([Fault("checkpoint.resume", text)])


def stopped_code() -> int:
    """Exit code of a run that has saved before its last step; 0 where STOPPED_CODE is not set.

    Raises:
        UserError: it is no exit code.
    """
    text = os.environ.get(STOPPED_CODE, "0")
    if not re.fullmatch(r"\d{1,3}", text) or int(text) > LARGEST_CODE:
        raise UserError(f"{STOPPED_CODE} is {text!r}: give an exit code, 0 to {LARGEST_CODE}")
    return int(text)
