"""Decide if a scheduler starts an unfinished job again, from progress.txt and the flight recorder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.errors import UserError
from mimo_train.flight.read import newest_start
from mimo_train.launch.restarts import ANOTHER_MACHINE, Failure, failure_in
from mimo_train.logging.progress import ENDED, EXIT, FINISHED, START, Event, append, events

AGAIN = 75
"""Exit code of `mimo-train launch requeue` that asks for another start: EX_TEMPFAIL of sysexits.h."""
MOST_FAILURES = 3
"""Consecutive failures without a new checkpoint after which a job is not started again."""
UNKNOWN = -1
"""First step of a job that left no line in progress.txt."""


@dataclass(frozen=True)
class Ended:
    """How a scheduled job ended before its run was finished."""

    began: int
    """Step that it resumed from."""
    outcome: str
    """Step and reason; equal words mean an equal end."""
    failed: bool
    """False if a stop was requested."""


def stopped(began: int, step: int, reason: str) -> Ended:
    """Return the end of a job that was stopped and has saved.

    Args:
        reason: from the `exit` line in progress.txt.
    """
    return Ended(began, f"{reason} after step {step}", failed=False)


def failed(began: int, failure: Failure) -> Ended:
    """Return the end of a job that failed, without its exit code. The code depends on a race: the scheduler or the
    launcher may be first to end the other ranks."""
    error = f": {failure.error}" if failure.error else ""
    return Ended(began, f"failure {failure.where}{error}", failed=True)


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


def requeue(run_dir: Path, job: str, code: int) -> tuple[int, str]:
    """Decide if a finished job starts again, and write the decision into progress.txt.

    Returns:
        0 if the run is finished, AGAIN if the job should start again, else its exit code; and the reason.
    """
    try:
        lines = list(events(run_dir))
    except OSError:
        lines = []
    if is_finished(lines, job):
        return 0, ""
    ended = end_of(run_dir, lines, job, code)
    if ended is None:
        return code or 1, "not started again: the run had not begun"
    again, reason = decide(code, ended, ends_before(lines))
    facts = {"began": ended.began, "failed": int(ended.failed), "outcome": ended.outcome}
    append(run_dir, ENDED, job=job, **facts)
    return AGAIN if again else code or 1, reason


def is_finished(lines: Sequence[Event], job: str) -> bool:
    """True if `job` (see `scheduled_job`) has brought its run to the last step, by `lines` of progress.txt."""
    return any(line.kind == EXIT and line.facts.get("reason") == FINISHED for line in _last_start(lines, job))


def end_of(run_dir: Path, lines: Sequence[Event], job: str, code: int) -> Ended | None:
    """Return how an unfinished job ended; None if the run had not begun in it."""
    last = _last_start(lines, job)
    began = _number(last[0], "step") if last else UNKNOWN
    exits = [line for line in last if line.kind == EXIT]
    if exits and not code:
        return stopped(began, _number(exits[-1], "step"), exits[-1].facts.get("reason", ""))
    try:
        start = newest_start(run_dir)
    except UserError:
        return None
    # A job without a line may have failed in set-up: its ranks have opened their recorder files by then.
    return failed(began, failure_in(start, code)) if f"-{job}-" in f"-{start.name}-" else None


def ends_before(lines: Sequence[Event]) -> list[Ended]:
    """Return how earlier jobs ended, the newest last."""
    return [
        Ended(_number(line, "began"), line.facts.get("outcome", ""), line.facts.get("failed") == "1")
        for line in lines
        if line.kind == ENDED
    ]


def _last_start(lines: Sequence[Event], job: str) -> Sequence[Event]:
    """Return the lines since the last start if it was in this job: the launcher may have restarted the run."""
    starts = [at for at, line in enumerate(lines) if line.kind == START]
    return lines[starts[-1] :] if starts and lines[starts[-1]].facts.get("job") == job else []


def _number(line: Event, fact: str) -> int:
    try:
        return int(line.facts.get(fact, ""))
    except ValueError:
        return UNKNOWN
