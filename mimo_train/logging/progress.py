"""progress.txt: one line per event of a run, with tab-separated ISO time, event and facts.

2026-11-21T09:30:00+00:00	start	world_size=2	step=0	flops=0
2026-11-21T09:31:07+00:00	checkpoint	step=200	path=checkpoints/step_00000200	reason=save_interval
2026-11-21T09:31:07+00:00	throughput	step=200	flops=2e+13	tokens=409600	job_tflops=0.16	cumulative_tflops=0.15
2026-11-21T09:31:09+00:00	evaluation	step=200	sets=5d41402abc4b2a76	eval/loss=0.3121	eval/exact_match=0.9121
2026-11-21T09:35:40+00:00	exit	step=800	reason=finished
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from data.storage.url import Place
from mimo_train.config.errors import UserError
from mimo_train.flight.recorder import scheduled_job

PROGRESS_FILE = "progress.txt"
START, EXIT, ENDED = "start", "exit", "ended"
"""Events that begin and end a job. `requeue` writes ENDED when it decides if the job starts again."""
EVALUATION = "evaluation"
FINISHED = "finished"
"""Reason of EXIT at the last step of a run."""

_logger = logging.getLogger(__name__)
_unwritable: set[Path] = set()
"""Run folders that have been reported as unwritable."""


def append_to_progress_log(run_dir: Path, text: str) -> None:
    """Append one line: the UTC time, a tab, and `text`. Tabs in `text` separate columns; line breaks become spaces. A
    file that cannot be written is reported once and never ends the run."""
    try:
        _append(run_dir, text)
    except OSError as error:
        if run_dir not in _unwritable:
            _unwritable.add(run_dir)
            _logger.warning("%s cannot be written (%s): training continues without it", run_dir / PROGRESS_FILE, error)
    else:
        _unwritable.discard(run_dir)


def _append(run_dir: Path, text: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = f"{now}\t{' '.join(text.splitlines())}\n"
    run_dir.mkdir(parents=True, exist_ok=True)
    # One write in append mode: lines of two processes never mix.
    descriptor = os.open(run_dir / PROGRESS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"  # the last line of a killed job
        os.write(descriptor, ("\n" if torn else "").encode() + line.encode())
    finally:
        os.close(descriptor)


def job_started(run_dir: Path, *, world_size: int, step: int, flops: float = 0.0) -> None:
    """Record the start of a job, with the scheduler's job if there is one.

    Args:
        step: completed steps.
        flops: model FLOPs of the run so far.
    """
    facts = f"{START}\tworld_size={world_size}\tstep={step}\tflops={flops:.17g}"
    append_to_progress_log(run_dir, f"{facts}\tjob={job}" if (job := scheduled_job()) else facts)


def checkpoint_saved(run_dir: Path, *, step: int, path: str | Place, reason: str) -> None:
    """Record a complete checkpoint and why it was saved."""
    append_to_progress_log(run_dir, f"checkpoint\tstep={step}\tpath={path}\treason={reason}")


def checkpoint_set_aside(run_dir: Path, *, path: Place, why: str) -> None:
    """Record a damaged checkpoint under its new name."""
    append_to_progress_log(run_dir, f"damaged\tpath={path}\twhy={why}")


def evaluated(run_dir: Path, *, step: int, values: dict[str, float], sets: str) -> None:
    """Record an evaluation with its values and a fingerprint of the held-out sets."""
    facts = "\t".join(f"{key}={value:.6g}" for key, value in values.items())
    append_to_progress_log(run_dir, f"{EVALUATION}\tstep={step}\tsets={sets}\t{facts}")


def job_exited(run_dir: Path, *, step: int, reason: str) -> None:
    """Record why a job ended, after `step` steps."""
    append_to_progress_log(run_dir, f"{EXIT}\tstep={step}\treason={reason}")


def job_ended(run_dir: Path, *, job: str, began: int, outcome: str, failed: bool) -> None:
    """Record how a scheduler's job ended, for the decision to start it again.

    Args:
        began: step that it resumed from.
        outcome: in words; equal for equal failures.
        failed: False for a requested stop.
    """
    text = " ".join(outcome.split())
    append_to_progress_log(run_dir, f"{ENDED}\tjob={job}\tbegan={began}\tfailed={int(failed)}\toutcome={text}")


def start_of_jobs(run_dir: Path, world_size: int) -> tuple[datetime, float]:
    """Return the time since which the run has had `world_size` processes, and its FLOPs until then.

    Returns:
        Start of the first of the latest consecutive jobs with `world_size` processes, and the FLOPs of the checkpoint
        it resumed from. A job that starts at step 0 begins a new run.

    Raises:
        OSError: there is no progress.txt.
        UserError: the last job had another number of processes.
    """
    first: _Job | None = None
    for job in _jobs(run_dir):
        if first is None or job.world_size != first.world_size or job.step == 0:
            first = job
    if first is None or first.world_size != world_size:
        last = f"its last job had {first.world_size}" if first else "it has no job"
        raise UserError(f"run.dir: {run_dir / PROGRESS_FILE} is not of a run on {world_size} processes: {last}")
    return first.start, first.flops


def throughput(run_dir: Path, *, world_size: int, step: int, tokens: int, flops: float, job_seconds: float) -> None:
    """Record FLOPs, tokens and throughput of the run so far. Call it on one rank, after `job_started`.

    Throughputs are model TFLOP/s per device: `job_tflops` of this job, `cumulative_tflops` of all jobs since
    `start_of_jobs`, where time between jobs and repeated steps count as lost. Without the job's start line in the file
    they are left out.

    Args:
        tokens: tokens trained since the first step of the run.
        flops: model FLOPs of all modules since the first step of the run.
        job_seconds: seconds since this job started.
    """
    facts = {"step": step, "flops": f"{flops:.3g}", "tokens": tokens}
    try:
        began, flops_before = start_of_jobs(run_dir, world_size)
        *_, job = _jobs(run_dir)
    except (UserError, OSError):
        pass
    else:
        # The log has whole seconds, a job begins before its line is written, and the clock may have been set.
        elapsed = max(time.time() - began.timestamp(), job_seconds)
        teraflops = 1e12 * world_size
        facts["job_tflops"] = f"{(flops - job.flops) / job_seconds / teraflops:.3g}"
        facts["cumulative_tflops"] = f"{(flops - flops_before) / elapsed / teraflops:.3g}"
    append_to_progress_log(run_dir, "\t".join(["throughput", *(f"{key}={value}" for key, value in facts.items())]))


class Event(NamedTuple):
    """A line of a progress.txt."""

    when: datetime
    kind: str
    facts: dict[str, str]


def events(run_dir: Path) -> Iterator[Event]:
    """Yield the events of progress.txt in order, skipping torn or edited lines. Raises OSError if it cannot be read."""
    for line in (run_dir / PROGRESS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
        when, *rest = line.split("\t")
        try:
            yield Event(datetime.fromisoformat(when), rest[0], dict(fact.partition("=")[::2] for fact in rest[1:]))
        except (IndexError, ValueError):
            continue


class _Job(NamedTuple):
    start: datetime
    world_size: int
    step: int
    flops: float


def _jobs(run_dir: Path) -> Iterator[_Job]:
    for when, kind, facts in events(run_dir):
        if kind == START:
            with suppress(KeyError, ValueError):
                yield _Job(when, int(facts["world_size"]), int(facts["step"]), float(facts["flops"]))
