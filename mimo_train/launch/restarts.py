"""Decide if the launcher starts a failed run again."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.flight.read import newest_start, read_ranks
from mimo_train.launch.exit_signal import seconds_of

STOPPED_CODE = "MIMO_STOPPED_CODE"
"""Environment variable with the exit code of a run that was stopped and has saved. Set it where a scheduler restarts
unfinished runs: Kubernetes counts a pod that exits with 0 as complete."""
LONGEST_WAIT = 300.0
ANOTHER_MACHINE = 16
"""Exit code of `train.rerun` that asks for another machine."""
LARGEST_CODE = 255


@dataclass(frozen=True)
class Failure:
    """The failure that ended a run."""

    code: int
    """Exit code of the rank that failed first; negative for a signal."""
    step: int
    """Last step that any rank began; -1 if the run had not begun."""
    error: str = ""

    def __str__(self) -> str:
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"{how} {self.where}" + (f" ({self.error})" if self.error else "")

    @property
    def where(self) -> str:
        """Return the step in words."""
        return f"at step {self.step}" if self.step > 0 else "in set-up"


def newest_failure(run_dir: Path, code: int, since: float = 0.0) -> Failure:
    """Return the failure of the newest start, from its flight recorder files.

    Args:
        code: exit code of the rank that failed first.
        since: Unix time in seconds; earlier starts are ignored.
    """
    try:
        folder = newest_start(run_dir)
    except UserError:
        return Failure(code, -1)
    return failure_in(folder, code, since)


def failure_in(folder: Path, code: int, since: float = 0.0) -> Failure:
    """Return the failure of one start, from its flight recorder files."""
    ranks = read_ranks(folder, since=since)
    errors = sorted((rank.seen_at, rank.error) for rank in ranks.values() if rank.error)
    step = max((rank.step for rank in ranks.values()), default=-1)
    return Failure(code, step, errors[0][1] if errors else "")


class Restarts:
    """Decide after each failure if the launcher starts the ranks again.

    Args:
        number: `--max-restarts`.
        first_wait: seconds before the first restart; each later wait doubles, up to LONGEST_WAIT.
    """

    def __init__(self, number: int, first_wait: float):
        self.number, self._first_wait = number, first_wait
        self._failures: list[Failure] = []

    def after(self, failure: Failure) -> tuple[float | None, str]:
        """Return the seconds to wait before the next start (None for no start) and the reason."""
        count = len(self._failures)
        if failure.step < 0:
            return None, "not started again: the run had not begun"
        if failure.code == ANOTHER_MACHINE:
            return None, "not started again here"
        if failure.code == stopped_code():
            return None, f"not started again here: exit code {failure.code} ({STOPPED_CODE}) is that of a stop"
        if self._failures[-1:] == [failure]:
            return None, f"not started again: the same failure twice, {failure}"
        if count >= self.number:
            return (
                None,
                f"not started again: {count} of {self.number} restarts (MIMO_MAX_RESTARTS) made; {failure}",
            )
        self._failures.append(failure)
        seconds = min(LONGEST_WAIT, self._first_wait * 2**count)
        return seconds, f"{failure}; restart {count + 1} of {self.number} in {seconds:g} s, from the newest checkpoint"


def first_wait() -> float:
    """Return MIMO_RESTART_SECONDS, the seconds before the first restart (default 5).

    Raises:
        UserError: it is not a number of seconds.
    """
    return seconds_of("MIMO_RESTART_SECONDS", 5.0, or_none=True)


def require_resume(resume: str, reason: str = "") -> None:
    """Require that a restarted run resumes from its newest checkpoint.

    Args:
        resume: `checkpoint.resume`.
        reason: what restarts the run; default: STOPPED_CODE, if it is set.

    Raises:
        ConfigError: the run may be restarted but would not resume.
    """
    if not reason and STOPPED_CODE in os.environ:
        reason = f"{STOPPED_CODE} {stopped_code()}"
    if reason and resume != "auto":
        text = f"must be auto with {reason}, got {resume!r}: a restarted run continues from its newest checkpoint"
        raise ConfigError([Fault("checkpoint.resume", text)])


def stopped_code() -> int:
    """Return the exit code of a run that was stopped early and has saved; 0 if STOPPED_CODE is not set.

    Raises:
        UserError: it is not an exit code.
    """
    text = os.environ.get(STOPPED_CODE, "0")
    if not re.fullmatch(r"\d{1,3}", text) or int(text) > LARGEST_CODE:
        raise UserError(f"{STOPPED_CODE} is {text!r}: give an exit code, 0 to {LARGEST_CODE}")
    return int(text)
