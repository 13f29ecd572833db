"""progress.txt: what happened to a run, one line an event: ISO time, event, facts; columns separated by tabs.

2026-11-21T09:30:00+00:00	start	world_size=2	step=0
2026-11-21T09:31:07+00:00	checkpoint	step=200	path=checkpoints/step_00000200
2026-11-21T09:31:09+00:00	evaluation	step=200	eval/loss=0.3121	eval/exact_match=0.9121
2026-11-21T09:35:40+00:00	exit	step=800	reason=finished
"""

import os
from datetime import UTC, datetime
from pathlib import Path

PROGRESS_FILE = "progress.txt"


def append_to_progress_log(run_dir: Path, text: str) -> None:
    """Append one line: the time in UTC, a tab, `text` (whose tabs are column separators and line breaks become spaces).

    Raises:
        OSError: the file cannot be written.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = f"{now}\t{' '.join(text.splitlines())}\n"
    run_dir.mkdir(parents=True, exist_ok=True)
    # One write in append mode: lines of two processes never mix.
    descriptor = os.open(run_dir / PROGRESS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def job_started(run_dir: Path, *, world_size: int, step: int) -> None:
    """Note the start of a job on `world_size` processes, going on after `step`."""
    append_to_progress_log(run_dir, f"start\tworld_size={world_size}\tstep={step}")


def checkpoint_saved(run_dir: Path, *, step: int, path: str | Path) -> None:
    """Note a complete checkpoint."""
    append_to_progress_log(run_dir, f"checkpoint\tstep={step}\tpath={path}")


def evaluated(run_dir: Path, *, step: int, values: dict[str, float]) -> None:
    """Note an evaluation with its values."""
    facts = "\t".join(f"{key}={value:.6g}" for key, value in values.items())
    append_to_progress_log(run_dir, f"evaluation\tstep={step}\t{facts}")


def job_exited(run_dir: Path, *, step: int, reason: str) -> None:
    """Note why a job ended, after `step` steps."""
    append_to_progress_log(run_dir, f"exit\tstep={step}\treason={reason}")
