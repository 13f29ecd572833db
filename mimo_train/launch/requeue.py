"""Whether a scheduler should start a job of a run again: until the run is finished, but not for ever at one failure.
Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimo_train.launch.restarts import ANOTHER_MACHINE, Failure

AGAIN = 75
"""Exit code of `mimo-train launch requeue` that asks for another start: EX_TEMPFAIL of sysexits.h."""
MOST_FAILURES = 3
"""Failures one after the other that come before a new checkpoint, at whatever steps."""


@dataclass(frozen=True)
class Ended:
    """How a job ended before its run was finished."""

    began: int
    """The step that it went on from."""
    outcome: str
    """The step, and why; the same words for the same end."""
    failed: bool
    """Whether no stop was asked for."""


def stopped(began: int, step: int, reason: str) -> Ended:
    """The end of a job that was asked to stop, and saved.

    Args:
        reason: of the line `exit` in progress.txt.
    """
    return Ended(began, f"{reason} after step {step}", failed=False)


def failed(began: int, failure: Failure) -> Ended:
    """The end of a job by a failure. Of its exit code only what is not the scheduler's doing counts: who has ended the
    other tasks, and how, depends on which was faster."""
    where = f"at step {failure.step}" if failure.step > 0 else "in set-up"
    return Ended(began, f"failure {where}" + (f": {failure.error}" if failure.error else ""), failed=True)


def decide(code: int, ended: Ended, before: Sequence[Ended]) -> tuple[bool, str]:
    """Whether the job should start again, and why, in words.

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
    if len(last) == MOST_FAILURES and all(one.failed and one.began == ended.began for one in last):
        return False, f"not started again: {MOST_FAILURES} failures without a new checkpoint; {ended.outcome}"
    return True, f"{ended.outcome}; the run is not finished, and starts again from its newest checkpoint"
