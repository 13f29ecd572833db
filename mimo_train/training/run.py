"""`mimo-train train` on one rank, behind the command line: train, write the report, say what is there."""

import json
import os
import sys
import traceback

from mimo_train.config import ConfigContainer
from mimo_train.layout import RunLayout
from mimo_train.training.exit import ExitSignal


def main(cfg: ConfigContainer, layout: RunLayout) -> int:
    """Run one rank; returns its exit code.

    A rank that fails prints its own error and ends at once, without waiting for peers that wait for it: the launcher
    then ends them.
    """
    exit_signal = ExitSignal().listen()  # before the imports, which take their time

    import torch.distributed as dist

    from mimo_train.training.pretrain import pretrain

    try:
        code = pretrain(cfg, exit_signal=exit_signal)
    except BaseException as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        _print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Destroying process groups would wait for peers that are stuck in a collective.
        os._exit(1)
    rank, logging_rank = dist.get_rank(), _logging_rank(layout)
    dist.barrier()
    dist.destroy_process_group()
    if rank == logging_rank:
        _summarise(cfg, layout)
    return code


def _print_error(error: BaseException) -> None:
    prefix = f"rank {os.environ.get('RANK', '0')}: "
    if isinstance(error, ValueError):
        for line in str(error).splitlines():
            print(f"error: {prefix}{line}", file=sys.stderr)
    else:
        print("".join(f"{prefix}{line}" for line in traceback.format_exc().splitlines(keepends=True)), file=sys.stderr)


def _logging_rank(layout: RunLayout) -> int:
    language = layout.language
    return language.first_rank + (language.pp - 1) * language.tp * language.cp * language.dp


def _summarise(cfg: ConfigContainer, layout: RunLayout) -> None:
    from pathlib import Path

    from mimo_train.metrics.report import write_report

    run_dir = Path(cfg.run.dir)
    report = write_report(run_dir, cfg, layout)
    evaluations = [line for line in map(json.loads, (run_dir / "metrics.jsonl").open()) if "eval/loss" in line]
    if evaluations:
        last = evaluations[-1]
        print(
            f"held-out exact match {last['eval/exact_match']:.3f}, loss {last['eval/loss']:.3f} "
            f"({last['eval/samples']:.0f} samples, step {last['step']})"
        )
    print(f"report: {report}")
    if cfg.encoders:
        print(f'next: mimo-train generate {run_dir} --image FILE --prompt "Which digit is green?"')
    else:
        print(f'next: mimo-train generate {run_dir} --prompt "The data"')
