"""`mimo-train hang`: who waits for whom in a run, and who is to blame."""

import argparse
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import add_command


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "hang",
        _hang,
        "who waits for whom in a run, and who is to blame",
        "Reads the flight recorder files of RUN_DIR, live or dead, on any machine that sees\n"
        "the folder. Exit code 0 if nobody is to blame, 3 if a rank is.\n\n"
        "examples:\n"
        "  mimo-train hang runs/vlm_digits",
    )
    command.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run.dir of the run")


def _hang(args: argparse.Namespace) -> int:
    from mimo_train.flight.blame import kept_report, look, report
    from mimo_train.flight.read import newest_start

    folder = newest_start(args.run_dir)
    verdict = look(folder)
    kept = kept_report(folder, verdict)
    print(kept or report(args.run_dir, verdict))
    return 3 if kept or verdict.blamed else 0
