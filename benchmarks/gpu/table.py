"""The table as text, as a record of benchmarks/ and as JSON."""

import datetime
import json
import subprocess
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.jobs import ROOT, Outcome

WIDTH = 150
"""Columns of the table as text."""
MARKS = {"ok": "", "skipped": "skipped: ", "failed": "FAILED: ", "ended": "ENDED: "}
TITLE = "What this machine's GPU does"
FORMULA = "MFU = model FLOPs of a step / (seconds of the step x devices x peak FLOP/s of bf16, or fp8 for fp8 layers)"
NOTES = (
    f"{FORMULA}, with the peaks of mimo_train/logging/throughput.py; % of the ceiling: TFLOP/s of the step over those "
    "of the matmul. TF32 is off. Weights are random. Estimates are those of `mimo-train check`. `transformers` trains "
    "under autocast with weights in fp32, from batches in memory; both sides make their steps in turns."
)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        what: what was measured.
        result: the result, or the reason why there is none.
        state: ok, skipped, failed or ended.
        details: the last lines of a traceback.
        values: the numbers.
    """

    what: str
    result: str
    state: str = "ok"
    details: str = ""
    values: Any = None


def row(what: str, outcome: Outcome, show: Callable[[Any], str] = str) -> Row:
    """The row of an outcome, whose value `show` describes."""
    if outcome.state == "ok":
        return Row(what, show(outcome.value), values=outcome.value)
    if outcome.state == "failed":  # the last line of a traceback names the error
        before, _, last = outcome.text.rpartition("\n")
        return Row(what, last, "failed", before)
    first, _, rest = outcome.text.partition("\n")
    return Row(what, first, outcome.state, rest)


def as_text(section: str, row: Row, first: bool) -> str:
    """A row of the table, wrapped; details are indented below it.

    Args:
        first: print the name of the section in front.
    """
    head = f"{section if first else '':<12} {row.what:<38} "
    width = max(WIDTH - len(head), WIDTH // 3)  # names of tests may be long
    body = textwrap.wrap(MARKS[row.state] + row.result, width, subsequent_indent="  ") or [""]
    lines = [head + body[0], *(" " * len(head) + line for line in body[1:])]
    return "\n".join([*lines, *(f"{'':<15}| {line}" for line in row.details.splitlines())])


def as_record(rows: Sequence[tuple[str, Row]], machine: dict[str, Any], command: str, titles: dict[str, str]) -> str:
    """A record in the form of benchmarks/README.md.

    Args:
        rows: (name of its section, row) of the table.
        machine: the result of `machine.versions`.
        titles: of the sections that ran, by name.
    """
    gpus = [f"{gpu['name']} ({gpu['memory']:.1f} GiB)" for gpu in machine["gpus"]]
    packages = ", ".join(f"{name} {version or 'absent'}" for name, version in machine["packages"].items())
    parts = [
        f"# {TITLE}",
        f"**What**: {'; '.join(f'{name}: {title}' for name, title in titles.items())}. {NOTES}",
        f"**Machine**: {', '.join(gpus) or 'no GPU'}; {machine['cpu']}, {machine['memory']:.0f} GiB; one node.",
        f"**Software**: Python {machine['python']}, torch {machine['torch'] or 'absent'} with CUDA "
        f"{machine.get('cuda') or 'absent'}, driver {machine['driver'] or 'absent'}, cuDNN "
        f"{machine.get('cudnn') or 'absent'}, NCCL {machine.get('nccl') or 'absent'}, {packages}.",
        f"**Command**, once:\n\n```bash\n{command}\n```",
        f"**Date**: {datetime.date.today()}. **Commit**: {commit()}.",
        "| section | what | result |\n|---|---|---|\n" + "\n".join(_cells(name, row) for name, row in rows),
        *(f"{name}, {row.what}:\n\n```\n{row.details}\n```" for name, row in rows if row.details),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(rows: Sequence[tuple[str, Row]], machine: dict[str, Any], command: str) -> str:
    """All numbers."""
    table = [{"section": name} | vars(row) for name, row in rows]
    head = {"command": command, "date": f"{datetime.date.today()}", "commit": commit(), "machine": machine}
    return json.dumps(head | {"formula": FORMULA, "rows": table}, indent=1) + "\n"


def _cells(section: str, row: Row) -> str:
    cells = (section, row.what, MARKS[row.state] + row.result)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def commit() -> str:
    """The commit of this checkout, and whether files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        changed = " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return "unknown: not a git checkout"
