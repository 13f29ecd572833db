"""`mimo-train launch`: start the ranks of this node, fill in the file of a cluster, decide about another start."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import CONFIG_HELP, OVERRIDE_HELP, add_command, add_config_command, positive, whole
from mimo_train.commands.launch_sweep import add_sweep
from mimo_train.config.errors import UserError


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "launch",
        lambda _: command.print_help(),
        "start the ranks of a node, or write the file of a cluster",
        "Starts the ranks of this node, and writes what a cluster needs to do so on each of its nodes.\n"
        "See docs/launch.md.",
    )
    kinds = command.add_subparsers(title="commands", metavar="COMMAND")
    add_config_command(
        kinds,
        "here",
        _here,
        "start the ranks of this node, as scripts/train_vlm.sh does",
        "Starts as many processes as the layout needs on this node. On several nodes give the same command on each,\n"
        "with NNODES, NODE_RANK and MASTER_ADDR; they are also read from the variables of SLURM, mpirun, torchrun\n"
        "(PET_*), Kubeflow and SkyPilot.\n\n"
        "examples:\n"
        "  mimo-train launch here vlm_digits run.device=cpu\n"
        "  srun --ntasks-per-node=1 mimo-train launch here my.yaml",
    )
    add_sweep(kinds)
    _add_cluster(kinds)
    requeue = add_command(
        kinds,
        "requeue",
        _requeue,
        "say whether a SLURM job that has ended should start again",
        "Reads how the last job of a run ended. Exit code 0: the run is finished; 75: start the job again;\n"
        "else: the end. scripts/slurm/train_vlm.sbatch calls it.",
    )
    requeue.add_argument("code", metavar="CODE", type=int, help="exit code of the job")
    requeue.add_argument("config", metavar="CONFIG", help="the job's")
    requeue.add_argument("overrides", metavar="key=value", nargs="*", help="the job's")


def _add_cluster(kinds: Any) -> None:
    command = add_command(
        kinds,
        "cluster",
        _cluster,
        "fill in the file of a cluster: Kubernetes, Kubeflow or SkyPilot",
        "Writes a template of configs/cluster/ with the values of a run to standard output, after it has checked\n"
        "that the layout fills the nodes. Edit a copy of a template for anything else, and give its path.\n\n"
        "examples:\n"
        "  mimo-train launch cluster kubernetes recipes/llava_1_5_finetune layout=images_64 \\\n"
        "    run.dir=/runs/llava --nodes 8 --gpus-per-node 8 --set image=registry.example/mimo:1 \\\n"
        "    --set claim=runs --set mount=/runs --without-data > job.yaml\n"
        "  mimo-train launch cluster skypilot recipes/llava_1_5_finetune layout=images_64 \\\n"
        "    run.dir=/runs/llava --nodes 8 --gpus-per-node 8 --set gpu=H100 --set claim=runs \\\n"
        "    --set mount=/runs --without-data > task.yaml",
    )
    command.add_argument("template", metavar="TEMPLATE", help="kubernetes, trainjob, skypilot, or the path of a file")
    command.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    command.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDE_HELP)
    command.add_argument("--nodes", required=True, type=positive, help="number of nodes")
    command.add_argument("--gpus-per-node", required=True, type=whole, metavar="G", help="0: on the CPU")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value of the template; may be repeated",
    )
    command.add_argument(
        "--without-data",
        action="store_true",
        help="tokenizer, weights and shards are where the job runs, and need not be on this machine",
    )


def _cluster(args: argparse.Namespace) -> None:
    from mimo_train.launch.cluster import fill_in, lost_with_machine
    from mimo_train.launch.start import launch_of

    values: dict[str, str] = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or name in values:
            raise UserError(f"--set: expected NAME=VALUE, each name once, got {text!r}")
        values[name] = value
    launch = launch_of(args.config, args.overrides, args.nodes, {}, without_data=args.without_data)
    text = fill_in(args.template, launch, args.nodes, args.gpus_per_node, values)
    if lost := lost_with_machine(launch, values):
        print(f"warning: {lost}", file=sys.stderr)
    print(text, end="")


def _here(args: argparse.Namespace) -> int:
    from mimo_train.launch.start import launch_here

    return launch_here(args.config, args.overrides)


def _requeue(args: argparse.Namespace) -> int:
    from mimo_train.flight.recorder import scheduled_job
    from mimo_train.launch.restarts import requeue
    from mimo_train.launch.start import launch_of

    job = scheduled_job()
    if not job:
        raise UserError("SLURM_JOB_ID is not set: which job has ended?")
    run_dir = Path(launch_of(args.config, args.overrides, None, os.environ).cfg.run.dir)
    code, reason = requeue(run_dir, job, args.code)
    if reason:
        print(f"mimo-train: {reason}", file=sys.stderr)
    return code
