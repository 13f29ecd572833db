"""Muon and Adafactor against those of torch and transformers. `tests/dist/optim/test_optimizers.py` has layouts."""

from types import SimpleNamespace

import pytest
import torch
from transformers.optimization import Adafactor

from mimo_train.optim.group_optimizer import GroupOptimizer
from mimo_train.optim.muon import orthogonalised
from mimo_train.optim.shards import Shard, fused_sections

SHAPES = {"muon": ((48, 20), (12, 32)), "adafactor": ((48, 20), (12, 32), (7,))}
RATE, DECAY, MOMENTUM, STEPS = 1e-2, 0.1, 0.9, 5
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def theirs(algorithm: str, parameters: list) -> torch.optim.Optimizer:
    if algorithm == "muon":
        options = {"momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
        return torch.optim.Muon(parameters, lr=RATE, weight_decay=DECAY, **options)
    fixed_rate = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    return Adafactor(parameters, lr=RATE, weight_decay=DECAY, **fixed_rate)


def ours(algorithm: str, parameters: list, dtype: torch.dtype, sections: tuple[int, ...] = ()) -> GroupOptimizer:
    """Return the optimizer of a model of `dtype`, which is that of Muon's iteration."""
    group = {"params": parameters, "algorithm": algorithm, "momentum": MOMENTUM}
    optimizer = GroupOptimizer([group], lr=RATE, weight_decay=DECAY)
    shards = {
        each: Shard(torch.nn.Parameter(each.to(dtype)), ((0, each.numel()),), 0, None, ALONE, sections)
        for each in parameters
    }
    optimizer.attach(shards, [list(shards.values())])
    return optimizer


@pytest.mark.parametrize(("algorithm", "bound"), [("muon", 3e-2), ("adafactor", 1e-5)])
def test_updates_are_those_of_torch_and_transformers(algorithm, bound):
    torch.manual_seed(0)
    mine, right = ([torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES[algorithm]] for _ in range(2))
    # The iteration of torch's Muon is in bf16.
    optimizers = ours(algorithm, mine, torch.bfloat16), theirs(algorithm, right)
    for _ in range(STEPS):
        for each, other in zip(mine, right, strict=True):
            each.grad = torch.randn(each.shape) * torch.linspace(0.1, 3, each.shape[-1])
            other.grad = each.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for each, other in zip(mine, right, strict=True):
        assert (each - other).norm() < bound * (other - 1).norm()


def test_muon_orthogonalises_the_matrices_of_a_fused_weight_one_by_one():
    torch.manual_seed(0)
    fused = torch.nn.Parameter(torch.zeros(12, 8))
    fused.grad = torch.randn(12, 8)
    expected = torch.empty(12, 8)
    # Two groups of heads: three rows of queries, two of keys, one of values.
    for rows in ((0, 1, 2, 6, 7, 8), (3, 4, 9, 10), (5, 11)):
        # The first momentum is a multiple of the gradient.
        expected[[*rows]] = orthogonalised(fused.grad[[*rows]], torch.float32)
    ours("muon", [fused], torch.float32, sections=(3, 2, 1)).step()
    torch.testing.assert_close(fused.detach(), -RATE * expected, rtol=1e-3, atol=1e-5)


def test_gate_and_up_are_two_matrices_and_an_adapter_of_both_is_one():
    layer = torch.nn.Linear(4, 6)
    layer.lora_a, layer.lora_b = torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(6, 3))
    block = torch.nn.Module()
    block.linear_fc1, block.config = layer, SimpleNamespace(gated_linear_unit=True)
    assert fused_sections([block]) == {id(layer.weight): (3, 3), id(layer.lora_b): (3, 3)}
