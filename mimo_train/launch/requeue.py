"""Decide whether a scheduler starts the job of a run again, from progress.txt and the flight recorder: until the run is
finished, but not for ever at one failure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.errors import UserError
from mimo_train.flight.read import newest_start
from mimo_train.launch.restarts import ANOTHER_MACHINE, Failure, failure_in
from mimo_train.logging.progress import ENDED, EXIT, FINISHED, START, Event, events, job_ended

AGAIN = 75
"""Exit code of `mimo-train launch requeue` that asks for another start: EX_TEMPFAIL of sysexits.h."""
MOST_FAILURES = 3
"""Consecutive failures without a new checkpoint after which a job is not started again."""
UNKNOWN = -1
"""Step from which a job began that has left no line."""


@dataclass(frozen=True)
class Ended:
    """How a scheduled job ended before its run was finished."""

    began: int
    """The step that it continued from."""
    outcome: str
    """The step and the reason; the same words for the same end."""
    failed: bool
    """False if a stop was requested."""


def stopped(began: int, step: int, reason: str) -> Ended:
    """Return the end of a job that was requested to stop, and saved.

    Args:
        reason: of the line `exit` in progress.txt.
    """
    return Ended(began, f"{reason} after step {step}", failed=False)


def failed(began: int, failure: Failure) -> Ended:
    """Return the end of a job by a failure. Its exit code does not count: it depends on whether the scheduler or the
    launcher was faster to end the other ranks."""
    error = f": {failure.error}" if failure.error else ""
    return Ended(began, f"failure {failure.where}{error}", failed=True)


def decide(code: int, ended: Ended, before: Sequence[Ended]) -> tuple[bool, str]:
    """Return whether the scheduler should start the job again, and the reason in words.

    Args:
        code: exit code of the job's step.
        ended: how it ended.
        before: how the jobs before it ended, the newest last.
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
    """Decide about a job that has ended, and write the decision into progress.txt.

    Args:
        run_dir: of the run.
        job: see `scheduled_job`.
        code: exit code of the job.

    Returns:
        0 if the run is finished, AGAIN if the job should start again, else the code for its end; and the reason.
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
    job_ended(run_dir, job=job, began=ended.began, outcome=ended.outcome, failed=ended.failed)
    return AGAIN if again else code or 1, reason


def is_finished(lines: Sequence[Event], job: str) -> bool:
    """True if a job has brought its run to the last step.

    Args:
        lines: of progress.txt.
        job: see `scheduled_job`.
    """
    return any(line.kind == EXIT and line.facts.get("reason") == FINISHED for line in _last_start(lines, job))


def end_of(run_dir: Path, lines: Sequence[Event], job: str, code: int) -> Ended | None:
    """Return how a job ended that has not finished the run; None if the run had not begun in it.

    Args:
        lines, job: see `is_finished`.
        code: exit code of the job.
    """
    last = _last_start(lines, job)
    began = _number(last[0], "step") if last else UNKNOWN
    exits = [line for line in last if line.kind == EXIT]
    if exits and not code:
        return stopped(began, _number(exits[-1], "step"), exits[-1].facts.get("reason", ""))
    try:
        start = newest_start(run_dir)
    except UserError:
        return None
    # Without a line of this job it may have failed in set-up: its ranks have opened their files then.
    return failed(began, failure_in(start, code)) if f"-{job}-" in f"-{start.name}-" else None


def ends_before(lines: Sequence[Event]) -> list[Ended]:
    """Return how earlier jobs ended, the newest last."""
    return [
        Ended(_number(line, "began"), line.facts.get("outcome", ""), line.facts.get("failed") == "1")
        for line in lines
        if line.kind == ENDED
    ]


def _last_start(lines: Sequence[Event], job: str) -> Sequence[Event]:
    """Return the lines since the last start of the run, if that was in this job: its launcher may have restarted it."""
    starts = [at for at, line in enumerate(lines) if line.kind == START]
    return lines[starts[-1] :] if starts and lines[starts[-1]].facts.get("job") == job else []


def _number(line: Event, fact: str) -> int:
    try:
        return int(line.facts.get(fact, ""))
    except ValueError:
        return UNKNOWN
