"""`mimo-train compare`: several runs on one page and in one table."""

import argparse
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import about_files, add_command
from mimo_train.config.errors import UserError


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "compare",
        about_files(_compare),
        "compare runs on one page",
        "Writes a page with config differences, curves, metrics at equal samples and at equal time, and predictions\n"
        "side by side, and prints a table. The runs may be going on, and be of different tasks. A folder of runs\n"
        "gives all of them.\n\n"
        "examples:\n"
        "  mimo-train compare runs/first runs/second\n"
        "  mimo-train compare runs/sweep --metric eval/exact_match --mode max",
    )
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the run.dir of a run, or a folder of runs")
    command.add_argument(
        "--to", metavar="FILE", type=Path, default=Path("compare.html"), help="page to write (default: compare.html)"
    )
    add_metric(command)


def add_metric(command: argparse.ArgumentParser) -> None:
    """Add the options that rank runs."""
    command.add_argument("--metric", metavar="NAME", default="", help="rank by the best value of this metric")
    command.add_argument("--mode", choices=("min", "max"), help="better values of --metric")


def require_mode(args: argparse.Namespace) -> None:
    """Raise UserError if only one of --metric and --mode is given."""
    if bool(args.metric) != bool(args.mode):
        raise UserError("--metric and --mode belong together: name a metric, and min or max for its better values")


def _compare(args: argparse.Namespace) -> None:
    from mimo_train.logging.report.compare import read_runs

    require_mode(args)
    show_comparison(read_runs(args.runs), args.to, args.metric, args.mode or "min")


def show_comparison(runs: list, to: Path, metric: str, mode: str) -> None:
    """Print the table of runs and write their page."""
    from data.text_format import shown
    from mimo_train.logging.report.compare import text_table, write_comparison

    rows = [[shown(cell) for cell in row] for row in text_table(runs, metric, mode)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for run in runs:
        for fault in run.faults:
            print(f"warning: {run.name}: {shown(fault)}")
    write_comparison(to, runs, metric, mode)
    print(f"page: {to}")
