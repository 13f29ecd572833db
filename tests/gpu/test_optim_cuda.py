"""The optimizer over modules on a GPU, with every optimizer. Skipped where there is no CUDA device."""

import math

import pytest
import torch

from data.demo.make import make_demo
from mimo_train.optim.group_optimizer import GroupOptimizer
from tests.dist.optim.test_optim import _broken_step, _curve
from tests.dist.optim.test_optim_modules import _curve_from
from tests.dist.optim.test_optim_stages import _curve as staged_curve
from tests.dist.optim.test_optim_stages import _train_and_save
from tests.dist.optim.test_optimizers import CASES
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, USUAL_ADAM, config, largest_difference
from tests.dist.steps import whole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def vlm(tmp_path, name: str, *overrides: str):
    """A run on one GPU."""
    demo = tmp_path / "digits"
    if not demo.exists():
        make_demo(demo, train_samples=480, held_out_samples=40, shards=2)
    fixed = ("layout=one_process", "run.device=cuda", "train.iters=20")
    return config("vlm_digits", tmp_path / name, demo, *fixed, *overrides)


def test_a_step_gives_the_numbers_of_megatron_cores_own_on_cuda(tmp_path):
    cfg = vlm(tmp_path, "run", "optim.clip_grad=0.5")
    ours, theirs = (whole(run_ranks(_curve, 1, cfg, own)) for own in (False, True))
    assert max(largest_difference(theirs, ours)) < TOLERANCE


def test_fp16_follows_fp32_on_cuda(tmp_path):
    ((exact, initial),) = run_ranks(_curve_from, 1, vlm(tmp_path, "fp32", *USUAL_ADAM), None)
    fp16 = vlm(tmp_path, "fp16", *USUAL_ADAM, "train.precision=fp16", "optim.initial_loss_scale=8")
    ((half, _),) = run_ranks(_curve_from, 1, fp16, [initial])
    assert 0 < largest_difference(whole([exact]), whole([half]))[0] < 1e-2


def test_an_overflow_skips_the_step_on_cuda(tmp_path):
    cfg = vlm(tmp_path, "run", "train.precision=fp16", "optim.initial_loss_scale=64")
    (found,) = run_ranks(_broken_step, 1, cfg, math.inf, 0)
    assert found["result"][0] is False and found["scales"] == [64, 32]
    assert found["weights"] and found["states"] and found["rates"]


def test_stages_follow_the_cpu_and_are_resumed_on_cuda(tmp_path):
    until = "modules.images.freeze_until={encoder: 3}"
    cpu = whole(run_ranks(staged_curve, 1, vlm(tmp_path, "cpu", until, "run.device=cpu"), 8))
    assert largest_difference(cpu, whole(run_ranks(staged_curve, 1, vlm(tmp_path, "cuda", until), 8)))[0] < 1e-3
    run_ranks(_train_and_save, 1, vlm(tmp_path, "saved", until), 5)
    resumed = whole(run_ranks(staged_curve, 1, vlm(tmp_path, "saved", until), 3))
    resumed = [(step + 5, loss, norm) for step, loss, norm in resumed]
    assert largest_difference(cpu[5:], resumed)[0] < 1e-3


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("case", CASES)
def test_optimizers_follow_the_cpu_on_cuda(case, moments, tmp_path):
    muon = next(choice for choice in CASES[case] if choice.endswith("muon"))
    options = (*CASES[case], muon.replace("name=muon", f"moments={moments}"), "optim.lr=2e-3", "optim.min_lr=0")
    cpu, cuda = (
        whole(run_ranks(staged_curve, 1, vlm(tmp_path, device, *options, f"run.device={device}"), 6))
        for device in ("cpu", "cuda")
    )
    assert largest_difference(cpu, cuda)[0] < 1e-3


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_offloaded_states_leave_the_device_and_change_no_number(algorithm, moments):
    def trained(offload: bool) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(8)]
        group = {"params": weights, "algorithm": algorithm, "moments": moments, "ema": 0.9, "offload": offload}
        optimizer, before = GroupOptimizer([group], lr=1e-2, weight_decay=0.1), torch.cuda.memory_allocated()
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
            for weight in weights:
                weight.grad = None
        for weight in weights:
            optimizer.write_states(weight, optimizer.read_states(weight))
        states = [value for weight in weights for value in optimizer.read_states(weight).values()]
        grown = torch.cuda.memory_allocated() - before
        return grown, [each.cpu().flatten() for each in (*(weight.detach() for weight in weights), *states)]

    (kept, values), (offloaded, others) = trained(False), trained(True)
    assert kept >= 8 * 2**20 * 5 and offloaded < 2**20
    assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
