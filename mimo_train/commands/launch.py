"""`mimo-train launch`: starts the ranks of this node, renders manifests of clusters, decides about another start."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_train.commands.arguments import add_command, add_config_command, positive, whole
from mimo_train.config.errors import ConfigError, Fault, UserError

if TYPE_CHECKING:
    from mimo_train.launch.manifests import Manifest
    from mimo_train.launch.pods import Volumes
    from mimo_train.launch.start import Launch


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "launch",
        lambda _: command.print_help(),
        "start the ranks of a node, or write manifests for a cluster",
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
    _add_kubernetes(kinds)
    _add_skypilot(kinds)
    requeue = add_command(
        kinds,
        "requeue",
        _requeue,
        "say whether a SLURM job that has ended should start again",
        "Reads how the last job of a run ended. Exit code 0: the run is finished; 75: start the job again;\n"
        "else: the end. scripts/slurm/train_vlm.sbatch calls it.",
    )
    requeue.add_argument("code", metavar="CODE", type=int, help="exit code of the job")
    requeue.add_argument("config", metavar="CONFIG", help="as of the job")
    requeue.add_argument("overrides", metavar="key=value", nargs="*", help="as of the job")


def _add_kubernetes(kinds: Any) -> None:
    command = add_config_command(
        kinds,
        "kubernetes",
        _kubernetes,
        "write the manifest of a run on Kubernetes",
        "Writes a Job with a pod on each node and a Service, or a TrainJob of Kubeflow, as YAML to standard output.\n\n"
        "examples:\n"
        "  mimo-train launch kubernetes recipes/llava_1_5_finetune layout=pictures_64 run.dir=/runs/llava \\\n"
        "    --nodes 8 --gpus-per-node 8 --image registry.example/mimo:1 --volume runs:/runs \\\n"
        "    --without-data > job.yaml\n"
        "  kubectl apply -f job.yaml",
    )
    command.add_argument("--nodes", required=True, type=positive, help="nodes, each with one pod")
    command.add_argument("--gpus-per-node", required=True, type=whole, metavar="G", help="GPUs of a pod; 0: on the CPU")
    _add_without_data(command)
    command.add_argument("--image", required=True, help="container image with mimo-train and CONFIG in it")
    command.add_argument("--as", dest="form", choices=("job", "trainjob"), default="job", help="what to write")
    command.add_argument("--name", default="mimo-train", help="of the job (default: mimo-train)")
    command.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:FOLDER",
        help="mount a persistent volume claim; run.dir must be on one that all nodes share",
    )
    command.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable in the pods")
    command.add_argument(
        "--secret", action="append", default=[], metavar="NAME=SECRET:KEY", help="set a variable from a Secret's key"
    )
    command.add_argument("--pull-secret", default="", metavar="SECRET", help="Secret of the image's registry")
    command.add_argument("--cpus", type=positive, default=0, help="CPUs of a pod (default: no limit)")
    command.add_argument("--memory", default="", help="memory of a pod, such as 512Gi (default: no limit)")
    command.add_argument(
        "--node-selector", action="append", default=[], metavar="KEY=VALUE", help="use nodes with this label only"
    )
    command.add_argument(
        "--rdma",
        action="append",
        default=[],
        metavar="RESOURCE=NUMBER",
        help="RDMA devices of a pod, as the device plugin names them: rdma/ib=8",
    )
    command.add_argument("--folder", help="working directory (default: the image's); of a job")
    command.add_argument("--restarts", type=whole, help="of a node that fails (default: 3); of a job")
    command.add_argument("--runtime", help="ClusterTrainingRuntime (default: torch-distributed); of a trainjob")


def _add_without_data(command: Any) -> None:
    command.add_argument(
        "--without-data",
        action="store_true",
        help="tokenizer, weights and shards are where the job runs, and need not be on this machine",
    )


def _add_skypilot(kinds: Any) -> None:
    command = add_config_command(
        kinds,
        "skypilot",
        _skypilot,
        "write the task of a run for SkyPilot",
        "Writes a task as YAML to standard output; start it from the checkout.\n\n"
        "example:\n"
        "  mimo-train launch skypilot recipes/llava_1_5_finetune layout=pictures_64 --nodes 8 \\\n"
        "    --accelerators H100:8 --without-data > task.yaml\n"
        "  sky jobs launch task.yaml",
    )
    command.add_argument("--nodes", required=True, type=positive, help="number of nodes")
    _add_without_data(command)
    command.add_argument("--accelerators", required=True, metavar="KIND:NUMBER", help="of each node, such as H100:8")
    command.add_argument("--name", default="mimo-train", help="of the task (default: mimo-train)")
    command.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="VOLUME:FOLDER",
        help="mount a volume of SkyPilot; run.dir must be on one that all nodes share",
    )


def _kubernetes(args: argparse.Namespace) -> None:
    with _naming_without_data(args):
        _write_kubernetes(args)


def _write_kubernetes(args: argparse.Namespace) -> None:
    from mimo_train.launch.manifests import (
        RESTARTS,
        RUNTIME,
        indexed_job,
        require_fit,
        require_gpus_used,
        train_job,
    )
    from mimo_train.launch.pods import Pods, env_of, node_selector_of, rdma_of, secrets_of, volumes_of

    of_others = ("runtime",) if args.form == "job" else ("folder", "restarts")
    for option in of_others:
        if getattr(args, option) is not None:
            raise UserError(f"--{option} is {getattr(args, option)}, which a {args.form} does not have: leave it out")
    launch = _launch(args)
    pods = Pods(
        name=args.name,
        image=args.image,
        nodes=args.nodes,
        gpus=args.gpus_per_node,
        claims=volumes_of(args.volume),
        env=env_of(args.env),
        secrets=secrets_of(args.secret),
        cpus=args.cpus,
        memory=args.memory,
        rdma=rdma_of(args.rdma),
        node_selector=node_selector_of(args.node_selector),
        pull_secret=args.pull_secret,
    )
    if pods.gpus:
        require_gpus_used(launch, f"--gpus-per-node is {pods.gpus}", "--gpus-per-node 0, or run.device=auto")
    require_fit(launch, pods.nodes, pods.gpus)
    if args.form == "job":
        restarts = RESTARTS if args.restarts is None else args.restarts
        manifests = indexed_job(launch, pods, args.folder or "", restarts)
    else:
        manifests = train_job(launch, pods, args.runtime or RUNTIME)
    _write(manifests, launch, pods.claims, args.folder or "")


def _skypilot(args: argparse.Namespace) -> None:
    with _naming_without_data(args):
        _write_skypilot(args)


def _write_skypilot(args: argparse.Namespace) -> None:
    from mimo_train.launch.manifests import sky_task
    from mimo_train.launch.pods import volumes_of

    launch = _launch(args)
    script = "train_vlm.sh" if launch.cfg.encoders else "train_gpt.sh"
    volumes = volumes_of(args.volume)
    _write(sky_task(launch, args.name, args.nodes, args.accelerators, script, volumes), launch, volumes)


@contextmanager
def _naming_without_data(args: argparse.Namespace) -> Iterator[None]:
    """A block whose config errors about files are followed by the option that leaves them out."""
    try:
        yield
    except ConfigError as error:
        from mimo_train.layout.run import INPUT_KEYS

        of_files = (*INPUT_KEYS, "pretrained", "adapter")
        if not args.without_data and any(fault.key.endswith(of_files) for fault in error.faults):
            error.faults.append(Fault("", "If these files are only where the job runs, add --without-data."))
            raise ConfigError(error.faults) from error
        raise


def _launch(args: argparse.Namespace) -> "Launch":
    from mimo_train.launch.start import launch_of

    return launch_of(args.config, args.overrides, args.nodes, {}, without_data=args.without_data)


def _write(manifests: "Sequence[Manifest]", launch: "Launch", volumes: "Volumes", working: str = "") -> None:
    """Print manifests, and warn of what is lost with a machine."""
    from mimo_train.launch.manifests import as_yaml, lost_with_machine

    if lost := lost_with_machine(launch, volumes, working):
        print(f"warning: {lost}", file=sys.stderr)
    print(as_yaml(manifests), end="")


def _here(args: argparse.Namespace) -> int:
    from mimo_train.launch.start import become

    return become(args.config, args.overrides)


def _requeue(args: argparse.Namespace) -> int:
    from mimo_train.flight.job import scheduled_job
    from mimo_train.launch.requeue import AGAIN, decide
    from mimo_train.launch.start import launch_of
    from mimo_train.logging import job_end, progress

    run_dir = Path(launch_of(args.config, args.overrides, None, os.environ).cfg.run.dir)
    lines, job = job_end.events_of(run_dir), scheduled_job()
    if not job:
        raise UserError("SLURM_JOB_ID is not set: which job has ended?")
    if job_end.is_finished(lines, job):
        return 0
    ended = job_end.end_of(run_dir, lines, job, args.code)
    if ended is None:
        print("mimo-train: not started again: the run had not begun", file=sys.stderr)
        return args.code or 1
    again, why = decide(args.code, ended, job_end.ends_before(lines))
    progress.job_ended(run_dir, job=job, began=ended.began, outcome=ended.outcome, failed=ended.failed)
    print(f"mimo-train: {why}", file=sys.stderr)
    return AGAIN if again else args.code or 1
