"""Shared by the commands: arguments that name a config, and the printing of faults."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from data.text_format import shown
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.evaluation.generation.options import Sampling

CONFIG_HELP = "name of a shipped config, such as vlm_digits, or path to a YAML file"
OVERRIDE_HELP = "changes to the config: train.iters=100, or a file of a group: layout=one_process"

Handler = Callable[[argparse.Namespace], int | None]
"""Runs a command; returns its exit code, None for 0."""


def add_command(commands: Any, name: str, handler: Handler, summary: str, description: str) -> argparse.ArgumentParser:
    """Add a command to the result of `ArgumentParser.add_subparsers()`.

    Args:
        summary: its line in `mimo-train --help`.
        description: the beginning of its own help, with examples.
    """
    command = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(handler=handler)
    return command


def add_config_command(
    commands: Any, name: str, handler: Handler, summary: str, description: str
) -> argparse.ArgumentParser:
    """Add a command that takes a config and changes to it."""
    command = add_command(commands, name, handler, summary, description)
    command.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDE_HELP)
    return command


def add_trust(command: argparse.ArgumentParser) -> None:
    """Add the option with which a checkpoint's own code is imported."""
    command.add_argument(
        "--trust-code",
        action="store_true",
        help="import an encoder of your own that the checkpoint's config names by its path (package.module:Spec)",
    )


def add_ema(command: argparse.ArgumentParser) -> None:
    """Add the option that reads the average of the weights."""
    command.add_argument("--ema", action="store_true", help="read the average of the weights (optim.ema of the run)")


def add_layout(command: argparse.ArgumentParser) -> None:
    """Add the options of the ranks that a trained model is opened on; see `evaluation.layouts.with_layout`."""
    command.add_argument(
        "--layout",
        default="",
        metavar="LAYOUT",
        help="parallel layout: run (as it was trained), a file or a name of configs/layout/ such as language_tp2, or "
        "sizes of the language model such as tp=2,dp=2, which encoders share unless they have sizes too (images.dp=4)",
    )
    command.add_argument("--processes", type=positive, metavar="N", help="replicas, without --layout (default: 1)")


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the argument `checkpoint`: any model that `open_source` can open."""
    command.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder or URL of a run or of one of its checkpoints, or folder of a model of transformers or of a peft "
        "adapter, or its name on the hub",
    )


def add_sampling(command: argparse.ArgumentParser) -> None:
    """Add the options of generated text; `sampling_of` reads them."""
    option = command.add_argument
    option(
        "--max-new-tokens",
        type=positive,
        default=MAX_NEW_TOKENS,
        metavar="N",
        help=f"longest answer in tokens (default: {MAX_NEW_TOKENS})",
    )
    option(
        "--temperature",
        type=float,
        metavar="T",
        help="draw tokens, from logits divided by T; 0: always the most likely one (default: 0, with --top-k or "
        "--top-p: 1)",
    )
    option("--top-k", type=whole, default=0, metavar="K", help="draw from the K most likely tokens; 0: all (default)")
    option(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest most likely tokens that have probability P together (default: 1)",
    )
    option("--seed", type=whole, metavar="N", help="draw the same tokens each time (default: others each time)")


MAX_NEW_TOKENS = 64
"""Longest answer in tokens by default."""


def given_sampling(args: argparse.Namespace) -> list[str]:
    """Return the options of `add_sampling` that differ from their defaults."""
    given = {
        "--max-new-tokens": args.max_new_tokens != MAX_NEW_TOKENS,
        "--temperature": args.temperature is not None,
        "--top-k": args.top_k,
        "--top-p": args.top_p < 1,
        "--seed": args.seed is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return the sampling options of `add_sampling`."""
    temperature = args.temperature
    if temperature is None:
        temperature = 1.0 if args.top_k or args.top_p < 1 else 0.0
    return Sampling(temperature, args.top_k, args.top_p, args.seed)


def positive(text: str) -> int:
    """Return an argument that is an integer of at least 1. Raises ArgumentTypeError for other texts."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, is {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    """Return an argument that is a finite number above 0. Raises ArgumentTypeError for other texts."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, is {text!r}")
    return number


def whole(text: str) -> int:
    """Return an argument that is an integer from 0 to 2^63 - 1. Raises ArgumentTypeError for other texts."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**63 - 1}, is {text!r}")
    return int(text)


def about_files(handler: Handler) -> Handler:
    """Turn an OSError of a handler into a user error, for commands that read and write files that the user names."""

    def run(args: argparse.Namespace) -> int | None:
        try:
            return handler(args)
        except OSError as error:
            raise UserError(str(error)) from error

    return run


def users_faults() -> tuple[type[Exception], ...]:
    """The base classes of user errors of all packages."""
    from data.errors import DataError
    from encoders.errors import EncoderError

    return UserError, DataError, EncoderError


def print_fault(error: Exception, prefix: str = "") -> None:
    """A line for each fault, on standard error."""
    if isinstance(error, ConfigError):
        from mimo_train.layout.run import with_config_faults

        error = with_config_faults(error)
    for line in str(error).splitlines():
        print(f"error: {prefix}{shown(line)}", file=sys.stderr)
