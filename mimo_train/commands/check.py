"""`mimo-train check`: check a run before it starts."""

import argparse
from typing import Any

from mimo_train.commands.arguments import add_config_command


def add(commands: Any) -> None:
    """Add the command."""
    command = add_config_command(
        commands,
        "check",
        _check,
        "check a run before it starts, without a GPU",
        "Prints what would run (modules, layout, memory, batch, data) and every fault at once, each with\n"
        "the config key to change. Exit code 1 if there is a fault. Starts no process group and needs no GPU.\n\n"
        "examples:\n"
        "  mimo-train check vlm_digits\n"
        "  mimo-train check vlm_digits layout=images_dp1_language_dp2 train.micro_batch_size=4\n"
        "  mimo-train check recipes/llava_1_5_finetune layout=pictures_64 --without-data",
    )
    command.add_argument(
        "--without-data", action="store_true", help="leave out tokenizer and shards, which need not be there"
    )


def _check(args: argparse.Namespace) -> int:
    from mimo_train.check import main

    return main(args.config, args.overrides, without_data=args.without_data)
