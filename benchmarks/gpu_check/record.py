"""The table as text and as a record of benchmarks/."""

import datetime
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checks import Line
from benchmarks.gpu_check.jobs import ROOT

WIDTH = 150
"""Columns of the table as text."""
MARKS = {"ok": "", "skipped": "skipped: ", "failed": "FAILED: ", "ended": "ENDED: "}


def as_text(check: str, line: Line, first: bool) -> str:
    """A line of the table, wrapped; the last words of what failed are set in beneath it.

    Args:
        first: whether the check is to be named in front.
    """
    head = f"{check if first else '':<9} {line.what:<38} "
    body = textwrap.wrap(MARKS[line.state] + line.result, WIDTH - len(head), subsequent_indent="  ") or [""]
    rows = [head + body[0], *(" " * len(head) + row for row in body[1:])]
    return "\n".join([*rows, *(f"{'':<12}| {row}" for row in line.details.splitlines())])


TITLE = "What this machine's GPU does"
WHAT = (
    "the table of `scripts/gpu_check.sh`: TFLOP/s of a bf16 matrix product; losses of 20 steps against the CPU's "
    "(largest relative difference, TF32 off); seconds of a step, tokens a second and MFU of a model with random "
    "weights (MFU by the peaks of mimo_train/logging/throughput.py); its heaviest kernels; tests/gpu."
)


def as_record(
    lines: Sequence[tuple[str, Line]], machine: dict[str, Any], command: str, title: str = TITLE, what: str = WHAT
) -> str:
    """A record in the form of benchmarks/README.md.

    Args:
        lines: (name of its check, line) of the table.
        machine: see `work.versions`.
        what: the question, and the quantities with their units.
    """
    gpus = [f"{gpu['name']} ({gpu['memory']:.1f} GiB)" for gpu in machine["gpus"]]
    packages = machine["packages"]
    details = [(name, line) for name, line in lines if line.details]
    parts = [
        f"# {title}",
        f"**What**: {what}",
        f"**Machine**: {', '.join(gpus) or 'no GPU'}; {machine['cpu']}, {machine['memory']:.0f} GiB; one node.",
        f"**Software**: Python {machine['python']}, torch {machine['torch'] or 'absent'}"
        + (f" with CUDA {machine['cuda']}" if machine["torch"] else "")
        + f", driver {machine['driver'] or 'absent'}, megatron-core {packages['megatron-core'] or 'absent'}, "
        f"Transformer Engine {packages['transformer-engine'] or 'absent'}.",
        f"**Command**, once:\n\n```bash\n{command}\n```",
        f"**Date**: {datetime.date.today()}. **Commit**: {commit()}.",
        "| check | of | result |\n|---|---|---|\n" + "\n".join(_row(name, line) for name, line in lines),
        *(f"{name}, {line.what}:\n\n```\n{line.details}\n```" for name, line in details),
    ]
    return "\n\n".join(parts) + "\n"


def _row(check: str, line: Line) -> str:
    cells = (check, line.what, MARKS[line.state] + line.result)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def commit() -> str:
    """Of this checkout, and whether it has been changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        changed = " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return "unknown: this is no git checkout"


def write(path: Path, text: str) -> None:
    """
    Raises:
        FileExistsError: `path` is there; a record is never changed.
    """
    with path.open("x") as file:
        file.write(text)
