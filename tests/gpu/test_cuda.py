"""The same run on a GPU: NCCL, every module on one rank. Skipped where there is no CUDA device."""

import pytest
import torch

from data.demo.make import make_demo
from tests.dist.runs import TOLERANCE, USUAL_ADAM, config, curve, largest_difference, train_on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(tmp_path, name: str, *overrides: str) -> list[tuple]:
    """Curve of 20 steps on one process."""
    demo = tmp_path / "digits"
    if not demo.exists():
        make_demo(demo, train_samples=480, held_out_samples=40, shards=2)
    return curve(
        train_on_ranks(config("vlm_digits", tmp_path / name, demo, "layout=one_process", "train.iters=20", *overrides))
    )


def test_cuda_follows_the_cpu(tmp_path):
    cpu, cuda = run(tmp_path, "cpu", "run.device=cpu"), run(tmp_path, "cuda", "run.device=cuda")
    assert largest_difference(cpu, cuda)[0] < 1e-3


def test_bf16_follows_fp32_on_cuda(tmp_path):
    exact = run(tmp_path, "fp32", "run.device=cuda", *USUAL_ADAM)
    half = run(tmp_path, "bf16", "run.device=cuda", "train.precision=bf16", *USUAL_ADAM)
    assert 0 < largest_difference(exact, half)[0] < 5e-2


def test_killed_cuda_run_continues(tmp_path):
    whole = run(tmp_path, "whole", "run.device=cuda", "checkpoint.save_interval=10")
    run(tmp_path, "half", "run.device=cuda", "optim.decay=constant", "train.iters=10")
    one = run(tmp_path, "one", "run.device=cuda", "optim.decay=constant")
    resumed = run(tmp_path, "half", "run.device=cuda", "optim.decay=constant")
    assert len(whole) == 20 and largest_difference(one, resumed)[0] < TOLERANCE
