"""The `mimo-train` command. Nothing heavy is imported before a command needs it: no torch for help or config errors."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from mimo_train.launch.own_packages import require_own_packages, working_directory_last

OUR_PACKAGES = ("mimo_train", "encoders", "data", "__main__")
"""Where a ValueError that is raised on purpose is a user's fault."""

DESCRIPTION = """\
Train vision-language models on Megatron-Core, each module with its own parallel layout.

examples:
  mimo-train check vlm_digits                          what would run, and everything that is wrong with it
  scripts/train_vlm.sh vlm_digits                      train it, with as many processes as the layout needs
  torchrun --nproc-per-node 2 -m mimo_train.cli train vlm_digits
  mimo-train generate runs/vlm_digits --image digit.png --prompt "Which digit is this?"
"""

CONFIG_HELP = "name of a shipped config, such as vlm_digits, or path to a YAML file"
OVERRIDE_HELP = "changes to the config: train.iters=100, or a file of a group: layout=one_process"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 a user's fault, 2 wrong usage, 16 and 17 a loss that is
    not to be trusted (`train.rerun`), 130 interrupted.

    A user's fault is printed as `error: ` and one line per fault. Anything unexpected keeps its traceback.
    """
    working_directory_last()
    try:
        require_own_packages()
    except ValueError as error:  # the same on every rank
        if os.environ.get("RANK", "0") == "0":
            _print_fault(error)
        return 1
    args = _parser().parse_args(argv)
    try:
        return args.handler(args) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        if not _raised_by_us(error):
            raise
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        _print_fault(error, f"rank {os.environ.get('RANK', '0')}: " if several else "")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mimo-train", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"mimo-train {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_config_command(
        commands,
        "train",
        _train,
        "train; one rank, started by torchrun",
        "Runs one rank of a run. Processes are started by torchrun, or by scripts/train_vlm.sh and\n"
        "scripts/train_gpt.sh, as many as `mimo-train world CONFIG` prints. A run.dir that holds a\n"
        "checkpoint is resumed.\n\n"
        "examples:\n"
        "  torchrun --nproc-per-node 2 -m mimo_train.cli train vlm_digits\n"
        "  mimo-train train vlm_digits layout=one_process train.iters=100",
    )
    _add_config_command(
        commands,
        "check",
        _check,
        "prove the contract of a run, without a GPU",
        "Prints what would run (modules, layout, memory, batch, data) and every fault at once, each with\n"
        "the config key to change. Exit code 1 if there is a fault. Starts no process group and needs no GPU.\n\n"
        "examples:\n"
        "  mimo-train check vlm_digits\n"
        "  mimo-train check vlm_digits layout=images_dp1_language_dp2 train.micro_batch_size=4",
    )
    _add_config_command(
        commands,
        "world",
        _world,
        "print how many processes the layout needs",
        "Prints one integer, the processes that the layout needs.\n\n"
        "example:\n"
        "  torchrun --nproc-per-node $(mimo-train world my.yaml) -m mimo_train.cli train my.yaml",
    )
    _add_config_command(
        commands,
        "config",
        _config,
        "print the resolved config as YAML",
        "Prints the complete config, defaults and overrides included. The output is a config itself.\n\n"
        "example:\n"
        "  mimo-train config vlm_digits train.iters=100 > my.yaml",
    )
    _add_generate(commands)
    from mimo_train.commands.shards import add_subparser

    add_subparser(commands)
    return parser


def _add_config_command(commands, name: str, handler, summary: str, description: str) -> None:
    command = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDE_HELP)
    command.set_defaults(handler=handler)


def _add_generate(commands) -> None:
    command = commands.add_parser(
        "generate",
        help="try a checkpoint",
        description="Loads a checkpoint on one process and lets it answer.\n\nexample:\n"
        '  mimo-train generate runs/vlm_digits --image digit.png --prompt "Which digit is this?"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a run, or of one of its checkpoints")
    command.add_argument("--prompt", required=True, metavar="TEXT", help="what to ask")
    command.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture; repeat it for several, in order"
    )
    command.add_argument(
        "--audio", action="append", default=[], metavar="FILE", help="a clip, after the pictures; repeat it for several"
    )
    command.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="longest answer in tokens (default: 64)"
    )
    command.set_defaults(handler=_generate)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, is {text!r}")
    return int(text)


def _version() -> str:
    try:
        return version("mimo-train")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _train(args: argparse.Namespace) -> int:
    """Faults found before the start are the same on every rank: rank 0 prints them, the others exit 1 silently."""
    from mimo_train.config.schema import ConfigError
    from mimo_train.launch.processes import is_idle, say_idle, start_faults
    from mimo_train.launch.torchrun import end_with_launcher

    end_with_launcher()
    try:
        cfg, layout = _load(args)
        faults = start_faults(cfg, layout)
        if faults:
            raise ConfigError(faults)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            _print_fault(error)
        return 1
    if is_idle(layout):  # before the imports, which take their time
        say_idle()
        return 0
    from mimo_train.commands.train import main as train

    return train(cfg, layout)


def _check(args: argparse.Namespace) -> int:
    from mimo_train.check import main as check

    return check(args.config, args.overrides)


def _world(args: argparse.Namespace) -> None:
    _, layout = _load(args)
    print(layout.processes[-1] + 1)


def _config(args: argparse.Namespace) -> None:
    from mimo_train.config import compose

    print(compose.to_yaml(compose.load(args.config, args.overrides)), end="")


def _generate(args: argparse.Namespace) -> int:
    from mimo_train.commands.generate import main as generate

    media = {"image": args.image, "audio": args.audio}
    return generate(args.checkpoint, prompt=args.prompt, media=media, max_new_tokens=args.max_new_tokens)


def _load(args: argparse.Namespace):
    """(config, layout) of a run that can start, as far as that is known without its data."""
    from mimo_train.check.faults import config_faults
    from mimo_train.config import compose
    from mimo_train.config.schema import ConfigError
    from mimo_train.plan import layout, placement

    cfg = compose.load(args.config, args.overrides)
    placement.note_nodes(cfg)
    faults = config_faults(cfg)
    if faults:
        raise ConfigError(faults)
    return cfg, layout.plan(cfg)


def _raised_by_us(error: ValueError) -> bool:
    """Whether a `raise` statement of our own packages raised it, and not a call such as int("x") that went wrong."""
    import dis

    traceback = error.__traceback__
    while traceback.tb_next:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    ours = frame.f_globals.get("__name__", "").partition(".")[0] in OUR_PACKAGES
    return ours and frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _print_fault(error: ValueError, prefix: str = "") -> None:
    for line in str(error).splitlines():
        print(f"error: {prefix}{line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
