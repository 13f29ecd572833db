"""Processes without a module leave, and the others train as if they had never been there."""

import os

import pytest

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, train_rank

HOLES = ("placement.first_rank={images: 1, language: 3}", "placement.allow_idle=true")
SURPLUS = ("placement.allow_idle=true",)


def _train(cfg) -> tuple[int, int | None, str]:
    """(exit code, rank in the run if it has one, number for the launcher) of this process after a run."""
    import torch.distributed as dist

    return train_rank(cfg), dist.get_rank() if dist.is_initialized() else None, os.environ["RANK"]


def run(digits, run_dir, processes: int, *overrides: str) -> tuple[list[tuple], list]:
    """The curve of a run of five steps on two modules, and what its processes return."""
    cfg = config("vlm_digits", run_dir, digits, "layout=two_processes", "train.iters=5", *overrides)
    results = run_ranks(_train, processes, cfg)
    return curve(read_metrics(run_dir / "metrics.jsonl")), results


@pytest.fixture(scope="module")
def without_idle(digits, tmp_path_factory) -> list[tuple]:
    """The curve of the same run on two processes."""
    return run(digits, tmp_path_factory.mktemp("two"), 2)[0]


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [(HOLES, [None, 0, None, 1, None]), (SURPLUS, [0, 1, None])],
    ids=["holes before, between and behind", "more processes than the layout needs"],
)
def test_idle_processes_change_nothing(overrides, ranks, without_idle, digits, tmp_path):
    trained, results = run(digits, tmp_path, len(ranks), *overrides)
    assert results == [(0, rank, str(process)) for process, rank in enumerate(ranks)]
    assert trained == without_idle


def test_idle_processes_do_not_hold_up_a_restart_in_the_processes(digits, tmp_path):
    pytest.importorskip("nvidia_resiliency_ext.inprocess")
    from tests.dist.training.test_inprocess import _train_with_failures

    overrides = (*HOLES, "train.iters=6", "checkpoint.save_interval=2", "run.timeout_minutes=5")
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", *overrides, "run.inprocess_restarts=1")
    results = run_ranks(_train_with_failures, 4, cfg, 0, 1)
    assert results == [(0, 0, 0), (0, 2, 0), (0, 0, 0), (0, 2, 0)]
