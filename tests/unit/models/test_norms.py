"""Norms of large tensors, which torch adds in fp32 one number after the other on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.cpu.kernels import BLOCK
from mimo_train.models.parameter_norms import squares_of
from mimo_train.optim.module_optimizer import ModuleOptimizer


@pytest.fixture(scope="module")
def large():
    """A tensor whose norm `torch.linalg.vector_norm` has wrong in the fourth digit, and the sum of its squares."""
    tensor = torch.randn(10_000_001, generator=torch.Generator().manual_seed(0))
    return tensor, float(tensor.double().square().sum())


def test_squares_of_large_tensors_have_the_digits_of_fp32(large):
    tensor, squares = large
    turned = tensor[:-1].reshape(1000, -1).T
    halves = tensor[: 9 * BLOCK].bfloat16()
    found = squares_of([tensor, torch.zeros(0), turned, halves, tensor[:5]])
    expected = [each.double().square().sum() for each in (tensor, torch.zeros(0), turned, halves, tensor[:5])]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([float(each) for each in expected], rel=1e-5)
    assert float(found[0]) == pytest.approx(squares, rel=1e-6)
    assert squares_of([tensor[:9].clone().fill_(float("inf"))]).isinf().all() and len(squares_of([])) == 0


def test_gradients_are_clipped_by_the_right_norm(large, monkeypatch):
    tensor, squares = large
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda message: None)
    optimizer = object.__new__(ModuleOptimizer)
    optimizer.module_infos, optimizer._device = {"language": None}, torch.device("cpu")
    optimizer._clip_grads = {"language": None}
    optimizer.config = SimpleNamespace(log_num_zeros_in_grad=False, use_distributed_optimizer=True)
    optimizer._collect_gradients = lambda: torch.zeros(1)
    optimizer.inner = lambda info: [SimpleNamespace(get_grads_for_grad_norm=lambda: [tensor])]
    assert optimizer.reduce_norms()[0].squares["language"] == pytest.approx(squares, rel=2e-6)
