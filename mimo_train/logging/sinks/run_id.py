"""The id that a tracker gave a run, kept in run.dir, so that a resumed run goes on in the same place."""

from pathlib import Path


def kept_id(file: Path, resumed_step: int) -> str | None:
    """The id in `file` when the run goes on after `resumed_step`; None for a new run."""
    return file.read_text().strip() if resumed_step > 0 and file.exists() else None


def keep_id(file: Path, run_id: str) -> str:
    """Write `run_id` to `file`; returns it."""
    file.write_text(run_id + "\n")
    return run_id
