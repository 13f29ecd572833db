"""Decide if a run starts again: after a failure by its launcher, and after its job by a scheduler."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.flight.read import newest_start, read_ranks
from mimo_train.launch.exit_signal import seconds_of
from mimo_train.launch.nodes import number
from mimo_train.logging.progress import ENDED, EXIT, FINISHED, START, append, events

STOPPED_CODE = "MIMO_STOPPED_CODE"
"""Environment variable with the exit code of a run that was stopped and has saved. Set it where a scheduler restarts
unfinished runs: Kubernetes counts a pod that exits with 0 as complete."""
LONGEST_WAIT = 300.0
ANOTHER_MACHINE = 16
"""Exit code of `train.rerun` that asks for another machine."""
AGAIN = 75
"""Exit code of `mimo-train launch requeue` that asks for another start: EX_TEMPFAIL of sysexits.h."""
MOST_FAILURES = 3
"""Consecutive failures without a new checkpoint after which a job is not started again."""


def first_wait() -> float:
    """Return MIMO_RESTART_SECONDS, the seconds before the first restart (default 5). Raises UserError if it is not a
    number of seconds."""
    return seconds_of("MIMO_RESTART_SECONDS", 5.0, or_none=True)


def stopped_code() -> int:
    """Return the exit code of a run that was stopped early and has saved; 0 if STOPPED_CODE is not set. Raises
    UserError if it is not an exit code."""
    return number(STOPPED_CODE, os.environ.get(STOPPED_CODE, "0"), 0, 255)


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


def newest_failure(run_dir: Path, code: int, since: float = 0.0, job: str = "") -> Failure:
    """Return the failure of the newest start, from its flight recorder files.

    Args:
        code: exit code of the rank that failed first.
        since: Unix time in seconds; earlier starts are ignored.
        job: ignore starts of other jobs (see `scheduled_job`).
    """
    try:
        folder = newest_start(run_dir)
    except UserError:
        return Failure(code, -1)
    if job and f"-{job}-" not in f"-{folder.name}-":
        return Failure(code, -1)
    ranks = read_ranks(folder, since).values()
    errors = sorted((rank.seen_at, rank.error) for rank in ranks if rank.error)
    return Failure(code, max((rank.step for rank in ranks), default=-1), errors[0][1] if errors else "")


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
            return None, f"not started again: {count} of {self.number} restarts (MIMO_MAX_RESTARTS) made; {failure}"
        self._failures.append(failure)
        seconds = min(LONGEST_WAIT, self._first_wait * 2**count)
        return seconds, f"{failure}; restart {count + 1} of {self.number} in {seconds:g} s, from the newest checkpoint"


@dataclass(frozen=True)
class Ended:
    """How a scheduled job ended before its run was finished."""

    began: int
    """Step that it resumed from; -1 if it had not begun."""
    outcome: str
    """Step and reason, without the exit code, which depends on a race: the scheduler or the launcher may be first to
    end the other ranks."""
    failed: bool
    """False if a stop was requested."""


def requeue(run_dir: Path, job: str, code: int) -> tuple[int, str]:
    """Decide if a finished job starts again, and write the decision into progress.txt.

    Args:
        job: see `scheduled_job`.

    Returns:
        0 if the run is finished, AGAIN if the job should start again, else its exit code; and the reason.
    """
    try:
        lines = list(events(run_dir))
    except OSError:
        lines = []
    starts = [number for number, line in enumerate(lines) if line.kind == START]
    # Since the last start: the launcher may have restarted the run within this job.
    since = lines[starts[-1] :] if starts and lines[starts[-1]].facts.get("job") == job else []
    exits = [line.facts for line in since if line.kind == EXIT]
    if any(exit.get("reason") == FINISHED for exit in exits):
        return 0, ""
    began = int(since[0].facts.get("step", -1)) if since else -1
    if exits and not code:
        ended = Ended(began, f"{exits[-1].get('reason')} after step {exits[-1].get('step')}", failed=False)
    else:
        failure = newest_failure(run_dir, code, job=job)
        # A job without a line may have failed in set-up: its ranks have opened their recorder files by then.
        if failure.step < 0:
            return code or 1, "not started again: the run had not begun"
        ended = Ended(began, f"failure {failure.where}" + (f": {failure.error}" if failure.error else ""), failed=True)
    before = [
        Ended(int(line.facts.get("began", -1)), line.facts.get("outcome", ""), line.facts.get("failed") == "1")
        for line in lines
        if line.kind == ENDED
    ]
    again, reason = decide(code, ended, before)
    facts = {"began": ended.began, "failed": int(ended.failed), "outcome": ended.outcome}
    append(run_dir, ENDED, job=job, **facts)
    return AGAIN if again else code or 1, reason


def decide(code: int, ended: Ended, before: Sequence[Ended]) -> tuple[bool, str]:
    """Return True if the scheduler should start the job again, and the reason.

    Args:
        before: ends of earlier jobs, the newest last.
    """
    if code == ANOTHER_MACHINE:
        return False, "not started again here: exit code 16 wants another machine (train.rerun)"
    if before and before[-1] == ended:
        return False, f"not started again: the same end twice, {ended.outcome}, both from step {ended.began}"
    last = [ended, *reversed(before)][:MOST_FAILURES]
    if len(last) == MOST_FAILURES and all(end.failed and end.began == ended.began for end in last):
        return False, f"not started again: {MOST_FAILURES} failures without a new checkpoint; {ended.outcome}"
    return True, f"{ended.outcome}; the run is not finished, and starts again from its newest checkpoint"
