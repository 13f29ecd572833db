"""The report of a check, and its printing: tables on a terminal, plain columns elsewhere."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from data.text_format import plural, shown
from mimo_train.config.errors import Fault

PLAIN_WIDTH = 500
"""Columns of output that is no terminal: wide enough that no line is broken."""


@dataclass(frozen=True)
class Table:
    """Rows under a title. `header` may be empty. Columns after the first `left` are right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)
    left: int = 99


@dataclass
class Report:
    """The results of a check. Each part of the check adds to it."""

    tables: list[Table] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    """Faults that prevent the run from starting."""
    warnings: list[str] = field(default_factory=list)
    """Problems that do not prevent the run."""
    notes: list[str] = field(default_factory=list)
    """Information, such as the checkpoint that the run resumes from."""


def show(report: Report, last_line: str, out: TextIO, err: TextIO) -> None:
    """Print tables, notes and warnings on `out`, then faults on `err`, or `last_line` on `out` if there are none."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=out, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=out, highlight=False, width=PLAIN_WIDTH, color_system=None)
    for table in report.tables:
        console.print(Text(table.title, style="bold"))
        grid = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else None, show_header=bool(table.header))
        for column in range(max(map(len, [table.header, *table.rows]))):
            name = table.header[column] if table.header else ""
            grid.add_column(Text(name), justify="left" if column < table.left else "right")
        for row in table.rows:
            grid.add_row(*(Text(shown(cell)) for cell in row))
        console.print(grid)
        for note in table.notes:
            console.print(Text(f" {note}"))
        console.print()
    for note in report.notes:
        console.print(Text(f"note: {shown(note)}"))
    for warning in report.warnings:
        console.print(Text(f"warning: {shown(warning)}", style="yellow"))
    out.flush()
    for fault in report.faults:
        for line in str(fault).splitlines():
            print(f"error: {shown(line)}", file=err)
    if report.faults:
        print(f"{plural(len(report.faults), 'fault')}: this run cannot start", file=err)
    else:
        console.print(Text(last_line, style="green"))


def spread(values: Sequence[int]) -> str:
    """Return the mean and the range of whole numbers as text."""
    return f"{sum(values) / len(values):.1f} on average, {min(values)} to {max(values)}"


def fault_of(error: Exception, key: str) -> Fault:
    """Return the fault for a data error, with the key that it starts with. Errors without a key, or with `data.shards`,
    which stands for any shards, get `key`."""
    match = re.match(r"(data\.[\w.\[\]-]+): ", str(error))
    if match is None or match[1] == "data.shards":
        return Fault(key, without_key(error, "data.shards"))
    return Fault(match[1], str(error)[match.end() :])


def without_key(error: Exception, key: str) -> str:
    """Return the text of an error without the key that it starts with."""
    return str(error).removeprefix(f"{key}:").removeprefix(f"{key} ").strip()
