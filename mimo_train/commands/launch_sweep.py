"""`mimo-train launch sweep`: a run for each combination of values, ranked at the end."""

import argparse
import sys
from typing import Any

from mimo_train.commands.arguments import add_config_command, positive
from mimo_train.commands.compare import add_metric, require_mode, show_comparison


def add_sweep(kinds: Any) -> None:
    """Add the command to those of `mimo-train launch`."""
    command = add_config_command(
        kinds,
        "sweep",
        _sweep,
        "run every combination of values, and rank the runs",
        "Starts a run for each combination, one after the other, in run.dir/task_N. The same command again skips\n"
        "finished runs and resumes the others. At the end it ranks the runs and writes run.dir/compare.html.\n\n"
        "examples:\n"
        "  mimo-train launch sweep vlm_digits run.dir=runs/rates --sweep optim.lr=1e-3,3e-4 --sweep run.seed=1,2\n"
        "  mimo-train launch sweep my.yaml run.dir=runs/layouts --sweep layout=one_process,two_processes --at-once 2\n"
        "  mimo-train launch sweep my.yaml run.dir=runs/rates --sweep optim.lr=1e-3,3e-4 --slurm",
    )
    command.add_argument(
        "--sweep",
        metavar="KEY=A,B,...",
        action="append",
        required=True,
        help="values of a key; repeat it for all combinations",
    )
    command.add_argument("--at-once", metavar="N", type=positive, help="most runs at a time (default: 1; --slurm: all)")
    command.add_argument(
        "--slurm", action="store_true", help="print the sbatch command of a job array instead of running here"
    )
    add_metric(command)


def _sweep(args: argparse.Namespace) -> int:
    from mimo_train.launch.sweep import open_sweep, run_here, slurm_command
    from mimo_train.logging.report.compare import read_runs

    require_mode(args)
    sweep = open_sweep(args.config, args.overrides, args.sweep)
    if args.slurm:
        if sweep.remaining:
            print(slurm_command(sweep, args.at_once or 0))
            return 0
        print(f"all {len(sweep.tasks)} tasks are finished", file=sys.stderr)
    failed = [] if args.slurm else run_here(sweep, args.at_once or 1, lambda text: print(text, flush=True))
    runs = read_runs([task.run_dir for task in sweep.tasks if (task.run_dir / "metrics.jsonl").exists()])
    if runs:
        metric, mode = (args.metric, args.mode) if args.metric else _watched(sweep.tasks[0].cfg)
        if not args.metric and not any(metric in run.data for run in runs):
            metric = ""
        show_comparison(runs, sweep.folder / "compare.html", metric, mode)
    for task in failed:
        print(f"error: {task} is not finished: {task.log}", file=sys.stderr)
    return 1 if failed else 0


def _watched(cfg: Any) -> tuple[str, str]:
    """Return the metric that the config watches, and its mode; `eval/loss` without one."""
    watched = (cfg.checkpoint.keep_best, cfg.train.stop_early)
    return next(((section.metric, section.mode) for section in watched if section.metric), ("eval/loss", "min"))
