"""The `mimo-train` command. A command imports what it needs, so that help and config errors are quick."""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from mimo_train.config.errors import UserError
from mimo_train.launch.import_guard import require_own_packages, working_directory_last

DESCRIPTION = """\
Train vision-language models on Megatron-Core, each module with its own parallel layout.

examples:
  mimo-train check vlm_digits                          what would run, and every fault
  scripts/train_vlm.sh vlm_digits                      train it, with as many processes as the layout needs
  torchrun --nproc-per-node 2 -m mimo_train.cli train vlm_digits
  mimo-train generate runs/vlm_digits --image digit.png --prompt "Which digit is this?"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 a user error, 2 wrong usage, 3 `hang` blames a
    rank, 16 and 17 a loss that cannot be trusted (`train.rerun`), 18 a run that hung, 75 of `launch requeue` a job
    to start again, 130 interrupted, 141 nobody reads the output.

    A user error is printed as `error: ` and one line per fault. Anything unexpected keeps its traceback.
    """
    working_directory_last()
    try:
        require_own_packages()
    except UserError as error:  # the same on every rank
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    from mimo_train.commands.arguments import print_fault, users_faults

    args = _parsed(argv)
    try:
        return args.handler(args) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`). Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit code of a process that SIGPIPE ends: no error was found
    except users_faults() as error:
        several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
        print_fault(error, f"rank {os.environ.get('RANK', '0')}: " if several else "")
        return 1


def command_modules() -> tuple[ModuleType, ...]:
    """Modules that add commands, in the order of the help."""
    # Not at the top: they import `data`, which may be another package until `require_own_packages` has looked.
    from mimo_train.commands import (
        check,
        checkpoint,
        compare,
        config,
        evaluate,
        export,
        generate,
        hang,
        launch,
        logs,
        plan,
        shards,
        train,
    )

    return train, check, plan, config, launch, evaluate, generate, compare, export, checkpoint, shards, hang, logs


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; changes to the config may stand behind options too, which argparse takes for unknown."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all(_is_override(text) for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    args.argv = list(sys.argv[1:] if argv is None else argv)  # for commands that start processes
    return args


def _is_override(text: str) -> bool:
    return text.startswith("~") or ("=" in text and not text.startswith("-"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimo-train", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in command_modules():
        module.add(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, which takes longer to look up than to print the help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("mimo-train")
        except PackageNotFoundError:
            number = "unknown (not installed)"
        print(f"mimo-train {number}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
