"""`mimo-train logs`: what all ranks of a run have logged, in one."""

import argparse
import time
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import add_command, whole

_SECONDS = 0.5
"""Between two looks for new lines."""


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "logs",
        _logs,
        "what all ranks of a run have logged, in one",
        "Prints the lines of RUN_DIR/logs in the order of their times, each with its rank: what\n"
        "ranks have printed, and the warnings of libraries. Times are UTC, of each rank's machine.\n\n"
        "examples:\n"
        "  mimo-train logs runs/vlm_digits\n"
        "  mimo-train logs runs/vlm_digits --rank 0 --rank 3 --follow",
    )
    command.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run.dir of the run")
    command.add_argument("--rank", type=whole, action="append", default=[], help="of this rank alone; may be repeated")
    command.add_argument("--follow", action="store_true", help="also print new lines, until Ctrl-C")


def _logs(args: argparse.Namespace) -> None:
    from data.text_format import shown
    from mimo_train.config.errors import UserError
    from mimo_train.config.paths import runs_within
    from mimo_train.logging.rank_log import FOLDER, Logs

    if not args.run_dir.is_dir():
        raise UserError(f"{args.run_dir} is no folder: give the run.dir of a run")
    others = "" if (args.run_dir / FOLDER).exists() else runs_within(args.run_dir, f"{FOLDER}/rank_*.log")
    if others:  # --follow would wait for ever
        raise UserError(f"{args.run_dir} has no logs of its own{others}")
    logs, some = Logs(args.run_dir, args.rank), False
    while True:
        for stamp, rank, text in logs:
            some = True
            print(f"{stamp} rank {rank}: {shown(text)}")
        if not args.follow:
            break
        print(end="", flush=True)
        time.sleep(_SECONDS)
    if not some:
        of = f" of rank {', '.join(map(str, args.rank))}" if args.rank else ""
        raise UserError(f"{args.run_dir / FOLDER} has no log{of}")
