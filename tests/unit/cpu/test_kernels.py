"""Matmuls, SwiGLU and RMSNorm on a CPU: torch's numbers, with backward passes of their own."""

import pytest
import torch
import torch.nn.functional as F

from mimo_train.cpu import kernels as module
from mimo_train.cpu.kernels import ROWS, WIDTH, linear, rms_norm, swiglu
from mimo_train.preflight.dry_run.counts import Counts

H, EPS = 24, 1e-5


def _given(kind: str = "rows") -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    inputs = 3 * torch.randn(7, 2, 4, H)
    if kind == "a part of a larger tensor":  # as queries are, in front of their norm
        inputs = torch.randn(7, 2, 4, 3, H)[:, :, :, 1]
    return inputs.requires_grad_(), torch.randn(H).requires_grad_()


def _is_own(output: torch.Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_RMSNormBackward"


def _gradients(output: torch.Tensor, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    return torch.autograd.grad(output, given, torch.randn(2, 7, 4, H).transpose(0, 1))


@pytest.mark.parametrize("kind", ["rows", "a part of a larger tensor"])
def test_the_numbers_are_torchs(kind):
    given = _given(kind)
    ours, theirs = rms_norm(*given, EPS), F.rms_norm(given[0], (H,), given[1], EPS)
    assert _is_own(ours) and not _is_own(theirs)
    assert torch.equal(ours, theirs)
    for pair in zip(_gradients(ours, given), _gradients(theirs, given), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-5)


def test_gradients_in_double_precision_are_right():
    given = [each.detach().double().requires_grad_() for each in _given()]
    assert torch.autograd.gradcheck(lambda inputs, weight: module._RMSNorm.apply(inputs, weight, EPS), given)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen):
    given = _given()
    given[frozen].requires_grad_(False)
    trained = given[1 - frozen]
    ours, theirs = rms_norm(*given, EPS), F.rms_norm(given[0], (H,), given[1], EPS)
    torch.testing.assert_close(_gradients(ours, (trained,)), _gradients(theirs, (trained,)), rtol=1e-6, atol=1e-5)
    rms_norm(*given, EPS).sum().backward()
    assert given[frozen].grad is None and trained.grad is not None


def test_torch_computes_the_rest(monkeypatch):
    inputs, weight = _given()
    assert not _is_own(rms_norm(inputs.bfloat16(), weight.bfloat16(), EPS))
    with torch.no_grad():
        assert torch.equal(rms_norm(inputs, weight, EPS), F.rms_norm(inputs, (H,), weight, EPS))
    monkeypatch.setattr(module.torch.compiler, "is_compiling", lambda: True)
    assert not _is_own(rms_norm(inputs, weight, EPS))


@pytest.mark.parametrize("trained", [(0, 1, 2), (0, 1), (1, 2), (0,), (1,)])
@pytest.mark.parametrize("shape", [(2, ROWS, WIDTH), (ROWS + 1, 3, WIDTH + 5)], ids=["multiples", "odd"])
def test_products_are_those_of_torch(shape, trained):
    torch.manual_seed(1)
    given = [torch.randn(shape), torch.randn(WIDTH + 1, shape[-1]), torch.randn(WIDTH + 1) if 2 in trained else None]
    leaves = [given[index].requires_grad_() for index in trained]
    ours, theirs = linear(*given), F.linear(*given)
    assert type(ours.grad_fn).__name__ == "_LinearBackward"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    gradient = torch.randn(shape[1], shape[0], WIDTH + 1).transpose(0, 1)  # not contiguous
    pairs = zip(torch.autograd.grad(ours, leaves, gradient), torch.autograd.grad(theirs, leaves, gradient), strict=True)
    for pair in pairs:
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows, width, outputs", [(ROWS - 1, WIDTH, WIDTH), (ROWS, WIDTH - 1, WIDTH), (ROWS, WIDTH, 1)])
def test_torch_computes_small_products(rows, width, outputs):
    weight = torch.randn(outputs, width, requires_grad=True)
    assert type(linear(torch.randn(rows, width), weight, None).grad_fn).__name__ != "_LinearBackward"


def test_inputs_of_a_frozen_weight_are_not_kept():
    inputs, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda shape: None):
        linear(inputs, weight, None)
    assert kept == [weight.shape]


def test_a_dry_run_counts_them():
    with Counts(lambda tensor: True) as counts:
        linear(torch.randn(ROWS, WIDTH), torch.randn(WIDTH + 1, WIDTH), None)
    assert counts.flops == 2 * ROWS * WIDTH * (WIDTH + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations_are_those_of_torch(dtype):
    torch.manual_seed(1)
    inner = torch.randn(7, 3, 40, dtype=dtype, requires_grad=True)
    gate, up = inner.chunk(2, dim=-1)
    ours, theirs, gradient = swiglu(inner), F.silu(gate) * up, torch.randn(3, 7, 20, dtype=dtype).transpose(0, 1)
    assert type(ours.grad_fn).__name__ == "_SwiGLUBackward" and torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(output, inner, gradient)[0] for output in (ours, theirs)))
