"""`mimo-train plan`: layouts that fit, the fastest first."""

import argparse
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import above_zero, add_config_command, positive
from mimo_train.estimate.devices import DEVICES, MARGIN


def add(commands: Any) -> None:
    """Add the command."""
    command = add_config_command(
        commands,
        "plan",
        _plan,
        "layouts that fit on a number of GPUs, the fastest first",
        "Predicts the time of a step of every legal layout of the modules, and prints the fastest that fit into\n"
        "memory, with the overrides that choose them. Needs no GPU and no torch; if the shards are there, their\n"
        "samples are counted as they are. See docs/planning.md for what is assumed.\n\n"
        "examples:\n"
        "  mimo-train plan recipes/llava_1_5_finetune --gpus 64\n"
        "  mimo-train plan recipes/llava_1_5_finetune --gpus 64 --gpu a100 --write llava_64.yaml",
    )
    command.add_argument("--gpus", type=positive, required=True, help="available GPUs")
    command.add_argument("--gpu", choices=DEVICES, default="h100", help="their kind (default: h100)")
    command.add_argument(
        "--memory", type=above_zero, metavar="GB", help="memory of one GPU, instead of that of its kind"
    )
    command.add_argument("--tflops", type=above_zero, metavar="T", help="peak rate in train.precision, in TFLOP/s")
    command.add_argument(
        "--bandwidth", type=above_zero, metavar="GB/S", help="bandwidth to other GPUs of the node, in one direction"
    )
    command.add_argument("--network", type=above_zero, metavar="GB/S", help="bandwidth to other nodes, for each GPU")
    command.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="(default: 8)")
    command.add_argument("--top", type=positive, default=5, metavar="N", help="number of proposals (default: 5)")
    command.add_argument(
        "--margin", type=_share, default=MARGIN, metavar="SHARE", help=f"share of memory kept free (default: {MARGIN})"
    )
    command.add_argument(
        "--media", type=above_zero, default=1.0, metavar="N", help="media items of a sample (default: 1)"
    )
    command.add_argument(
        "--write", type=Path, metavar="FILE", help="write the config with the first proposal, such as layout.yaml"
    )
    command.add_argument(
        "--without-data",
        action="store_true",
        help="do not read the shards: count every row as full and every media item as the largest",
    )
    command.add_argument("--json", action="store_true", help="print data instead of text")


def _share(text: str) -> float:
    """The type of an argument that is a share."""
    share = above_zero(text) if text not in ("0", "0.0") else 0.0
    if share >= 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, is {text!r}")
    return share


def _plan(args: argparse.Namespace) -> int:
    from mimo_train.preflight.plan.command import main

    return main(args)
