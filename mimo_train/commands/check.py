"""`mimo-train check`: check a run before it starts."""

import argparse
from typing import Any

from mimo_train.commands.arguments import add_config_command
from mimo_train.config.errors import UserError


def add(commands: Any) -> None:
    """Add the command."""
    command = add_config_command(
        commands,
        "check",
        _check,
        "check a run before it starts, without a GPU",
        "Prints the run (modules, layout, memory, batch, data) and all faults at once, each with\n"
        "the config key to change. Exit code 1 if there is a fault. Starts no process group and needs no GPU.\n\n"
        "examples:\n"
        "  mimo-train check vlm_digits\n"
        "  mimo-train check vlm_digits layout=images_dp1_language_dp2 train.micro_batch_size=4\n"
        "  mimo-train check recipes/llava_1_5_finetune layout=images_64 --without-data\n"
        "  mimo-train check vlm_digits modules.language.layout.tp=2 --dry-run",
    )
    command.add_argument(
        "--without-data", action="store_true", help="skip tokenizer, weights and shards, which need not exist"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="then run set-up, steps and evaluation of single ranks with fake tensors, as on GPUs unless "
        "run.device=cpu, and report memory, messages, waits of the host, and errors by line",
    )
    command.add_argument(
        "--ranks",
        metavar="RANKS",
        help="dry run: all-kinds (one rank of each kind, default), or ranks separated by commas",
    )


def _check(args: argparse.Namespace) -> int:
    from mimo_train.preflight.check import main

    if args.ranks is not None and not args.dry_run:
        raise UserError(f"--ranks {args.ranks} requires --dry-run")
    if args.dry_run:
        from mimo_train.preflight.dry_run.command import require_ranks

        require_ranks(args.config, args.overrides, args.ranks or "all-kinds")
    code = main(args.config, args.overrides, without_data=args.without_data)
    if code or not args.dry_run:
        return code
    from mimo_train.preflight.dry_run.command import main as dry_run

    return dry_run(args.config, args.overrides, args.ranks or "all-kinds")
