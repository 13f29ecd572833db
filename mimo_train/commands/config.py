"""`mimo-train config` and `mimo-train world`: the resolved config, and how many processes it needs."""

import argparse
from typing import Any

from mimo_train.commands.arguments import add_config_command


def add(commands: Any) -> None:
    """Add both commands."""
    add_config_command(
        commands,
        "world",
        _world,
        "print how many processes the layout needs",
        "Prints one integer, the processes that the layout needs.\n\n"
        "example:\n"
        "  torchrun --nproc-per-node $(mimo-train world my.yaml) -m mimo_train.cli train my.yaml",
    )
    add_config_command(
        commands,
        "config",
        _config,
        "print the resolved config as YAML",
        "Prints the complete config, defaults and overrides included. The output is a config itself.\n\n"
        "example:\n"
        "  mimo-train config vlm_digits train.iters=100 > my.yaml",
    )


def _world(args: argparse.Namespace) -> None:
    from mimo_train.config import compose
    from mimo_train.layout.run import resolve

    print(resolve(compose.load(args.config, args.overrides, weights=False)).layout.processes[-1] + 1)


def _config(args: argparse.Namespace) -> None:
    from mimo_train.config import compose

    print(compose.to_yaml(compose.load(args.config, args.overrides, weights=False)), end="")
