"""How the last job of a run has ended, from its progress.txt and the flight recorder's files."""

from collections.abc import Sequence
from pathlib import Path

from mimo_train.config.errors import UserError
from mimo_train.flight.read import newest_start
from mimo_train.launch.requeue import Ended, failed, stopped
from mimo_train.launch.restarts import failure_in
from mimo_train.logging.progress import ENDED, EXIT, FINISHED, START, Event, events

UNKNOWN = -1
"""Step from which a job began that has left no line."""


def events_of(run_dir: Path) -> list[Event]:
    """The lines of progress.txt; none where it cannot be read."""
    try:
        return list(events(run_dir))
    except OSError:
        return []


def is_finished(lines: Sequence[Event], job: str) -> bool:
    """Whether a job has brought its run to the last step.

    Args:
        lines: of progress.txt.
        job: as of `scheduled_job`.
    """
    return any(line.kind == EXIT and line.facts.get("reason") == FINISHED for line in _last_start(lines, job))


def end_of(run_dir: Path, lines: Sequence[Event], job: str, code: int) -> Ended | None:
    """How a job ended that has not finished the run; None where the run had not begun in it.

    Args:
        code: exit code of the job; other arguments as of `is_finished`.
    """
    own = _last_start(lines, job)
    began = _whole(own[0], "step") if own else UNKNOWN
    exits = [line for line in own if line.kind == EXIT]
    if exits and not code:
        return stopped(began, _whole(exits[-1], "step"), exits[-1].facts.get("reason", ""))
    try:
        start = newest_start(run_dir)
    except UserError:
        return None
    # Without a line of this job it may have failed in set-up: its ranks have opened their files then.
    return failed(began, failure_in(start, code)) if f"-{job}-" in f"-{start.name}-" else None


def ends_before(lines: Sequence[Event]) -> list[Ended]:
    """How earlier jobs ended, the newest last."""
    return [
        Ended(_whole(line, "began"), line.facts.get("outcome", ""), line.facts.get("failed") == "1")
        for line in lines
        if line.kind == ENDED
    ]


def _last_start(lines: Sequence[Event], job: str) -> Sequence[Event]:
    """The lines since the run was last started, if that was in this job: its launcher may have started it again."""
    starts = [at for at, line in enumerate(lines) if line.kind == START]
    return lines[starts[-1] :] if starts and lines[starts[-1]].facts.get("job") == job else []


def _whole(line: Event, fact: str) -> int:
    try:
        return int(line.facts.get(fact, ""))
    except ValueError:
        return UNKNOWN
