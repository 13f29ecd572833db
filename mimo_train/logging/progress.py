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

from mimo_train.config.errors import UserError
from mimo_train.flight.recorder import scheduled_job

PROGRESS_FILE = "progress.txt"
START, EXIT, ENDED, EVALUATION = "start", "exit", "ended", "evaluation"
"""Kinds of events that are read again. `requeue` writes ENDED when it decides if the job starts again."""
FINISHED = "finished"
"""Reason of EXIT at the last step of a run."""

_logger = logging.getLogger(__name__)


def append(run_dir: Path, kind: str, **facts: object) -> None:
    """Append a line: the UTC time, the kind of event, and its facts, with white space as single spaces. A file that
    cannot be written is reported and never ends the run."""
    path, now = run_dir / PROGRESS_FILE, datetime.now(UTC).isoformat(timespec="seconds")
    columns = [now, kind, *(f"{key}={' '.join(str(value).split())}" for key, value in facts.items())]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # One write in append mode: lines of two processes never mix.
        with path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            torn = size and os.pread(file.fileno(), 1, size - 1) != b"\n"  # the last line of a killed job
            file.write(("\n" if torn else "").encode() + "\t".join(columns).encode() + b"\n")
    except OSError as error:
        _logger.warning("%s cannot be written (%s): training continues without it", path, error)


def job_started(run_dir: Path, *, world_size: int, step: int, flops: float = 0.0) -> None:
    """Record the start of a job after `step` steps and `flops` model FLOPs, with the job of the scheduler, if any."""
    job = {"job": job} if (job := scheduled_job()) else {}
    append(run_dir, START, world_size=world_size, step=step, flops=f"{flops:.17g}", **job)


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
    facts: dict[str, object] = {}
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
    append(run_dir, "throughput", step=step, flops=f"{flops:.3g}", tokens=tokens, **facts)


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


def last_exit(run_dir: Path) -> dict[str, str]:
    """Return the facts of the end of a run's last job; empty if it is running or was killed, or there is none."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for event in events(run_dir):
            if event.kind in (START, EXIT):
                facts = event.facts if event.kind == EXIT else {}
    return facts


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
