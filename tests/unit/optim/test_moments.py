"""Moments in fewer bytes: errors, what is kept to the bit, and updates."""

import pytest
import torch

from mimo_train.optim import elementwise, moments
from mimo_train.optim.group_optimizer import GroupOptimizer


@pytest.mark.parametrize(("name", "error"), [("exp_avg", 0.048), ("exp_avg_sq", 0.034)])
def test_8_bit_keeps_every_value_nearly_and_what_was_read_exactly(name, error):
    torch.manual_seed(0)
    values = torch.randn(1000) * torch.logspace(-2, 2, 1000)
    values = values.square() if name.endswith("_sq") else values
    values[:3] = torch.tensor([0.0, -0.0, values.abs().max()])
    state: dict[str, torch.Tensor] = {}
    moments.add_moment(state, name, values, "8bit")
    assert moments.read(state, name).eq(0).all()
    assert sum(value.nbytes for value in state.values()) == 1000 + 4 * 4  # codes, and scales of 4 blocks
    moments.write(state, name, values)
    read = moments.read(state, name)
    is_large = values.abs() > 1e-4 * values.abs().max()
    assert ((read - values).abs() <= error * values.abs())[is_large].all()
    before = {key: value.clone() for key, value in state.items()}
    moments.write(state, name, read)
    assert all(torch.equal(before[key], state[key]) for key in state)


def test_a_square_in_8_bit_never_becomes_zero():
    state: dict[str, torch.Tensor] = {}
    values = torch.tensor([1.0, 1e-20, 0.0])
    moments.add_moment(state, "exp_avg_sq", values, "8bit")
    moments.write(state, "exp_avg_sq", values)
    assert [bool(value > 0) for value in moments.read(state, "exp_avg_sq")] == [True, True, False]


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
@pytest.mark.parametrize(("kind", "bound"), [("bf16", 0.02), ("8bit", 0.1)])
def test_training_with_fewer_bytes_follows_fp32(algorithm, kind, bound):
    def trained(moments: str) -> torch.Tensor:
        torch.manual_seed(0)
        weight, target = torch.nn.Parameter(torch.randn(40, 30)), torch.randn(40, 30)
        group = {"params": [weight], "algorithm": algorithm, "moments": moments}
        optimizer = GroupOptimizer([group], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(60):
            weight.grad = (weight.detach() - target) + 0.1 * torch.randn(40, 30)
            optimizer.step()
        return weight.detach()

    exact = trained("fp32")
    change = (exact - trained(kind)).norm() / exact.norm()
    assert 0 < change < bound, change


def test_lion_by_hand():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = GroupOptimizer([{"params": [weight], "algorithm": "lion"}], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient, expected in (([1.0, -1.0], [0.85, -1.8]), ([-0.05, 0.0], [0.7075, -1.61])):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.tensor(expected))
    torch.testing.assert_close(optimizer.read_states(weight)["exp_avg"], torch.tensor([0.0094, -0.0099]))


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_an_average_starts_as_the_weights_and_follows_them(algorithm):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    group = {"params": [weight], "algorithm": algorithm, "moments": "8bit", "ema": 0.75}
    optimizer, average = GroupOptimizer([group], lr=0.1), weight.detach().clone()
    for _ in range(3):
        weight.grad = torch.tensor([1.0, -1.0])
        optimizer.step()
        average = 0.75 * average + 0.25 * weight.detach()
        torch.testing.assert_close(optimizer.read_states(weight)["ema"], average)
    weight.grad = None  # like one of a group that waits for its step
    optimizer.step()
    torch.testing.assert_close(optimizer.read_states(weight)["ema"], average)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_states_on_the_host_change_no_number(algorithm, kind, monkeypatch):
    def trained(offload: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((40, 30), (7,), (2048,))]
        group = {"params": weights, "algorithm": algorithm, "moments": kind, "ema": 0.9, "offload": offload}
        optimizer = GroupOptimizer([group], lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape)
            optimizer.scale_gradients(0.7)
            optimizer.step()
        states = [{"weight": weight.detach(), **optimizer.read_states(weight)} for weight in weights]
        return {f"{name} {number}": value for number, state in enumerate(states) for name, value in state.items()}

    kept = trained(offload=False)
    monkeypatch.setattr(elementwise, "CHUNK", 1024)
    offloaded = trained(offload=True)
    assert kept.keys() == offloaded.keys() and all(kept[name].equal(offloaded[name]) for name in kept)
