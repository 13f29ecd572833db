"""Queries and keys turned by their positions, whose gradient is made in one piece."""

import pytest
import torch

from mimo_train.models import turned_heads
from mimo_train.models.turned_heads import parts_of, turned, turned_parts

S, B, G, D = 5, 2, 3, 8


def _given(each: int, dtype: torch.dtype = torch.float32, width: int = D) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    angles = torch.randn(S, B, 1, width // 2).repeat(1, 1, 1, 2)
    sign = torch.tensor([-1.0, 1.0]).repeat_interleave(width // 2)
    mixed = torch.randn(S, B, G, each + 2, D).to(dtype)
    return mixed.requires_grad_(), angles.cos().to(dtype), (angles.sin() * sign).to(dtype)


def _apart(mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    query, key, value = parts_of(mixed)
    return turned(query, cos, sin), turned(key, cos, sin), value


def _gradient(function, given: tuple[torch.Tensor, ...], unused: bool) -> torch.Tensor:
    query, key, value = function(*given)
    torch.manual_seed(2)
    # Attention hands gradients on as transposed views.
    weights = [torch.randn(B, S, part.shape[2], D).transpose(0, 1) for part in (query, key, value)]
    used = zip((query, key) if unused else (query, key, value), weights, strict=not unused)
    (gradient,) = torch.autograd.grad(sum((part * weight).sum() for part, weight in used), given[0])
    return gradient


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_the_numbers_are_those_of_separate_parts(each, unused):
    given = _given(each)
    ours, theirs = turned_parts(*given), _apart(*given)
    assert all("TurnedParts" in type(part.grad_fn).__name__ for part in ours)
    assert [part.shape for part in ours] == [(S, B, G * each, D), (S, B, G, D), (S, B, G, D)]
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    gradients = [_gradient(function, given, unused) for function in (turned_parts, _apart)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    assert gradients[0].is_contiguous()


def test_positions_that_all_rows_share():
    mixed, cos, sin = _given(1)
    given = mixed, cos[:, :1], sin[:, :1]
    gradients = [_gradient(function, given, False) for function in (turned_parts, _apart)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("given", [_given(1, torch.bfloat16), _given(2, width=4)], ids=["bf16", "a part of a head"])
def test_what_is_not_made_in_one_piece_is_made_of_parts(given):
    assert not any("TurnedParts" in type(part.grad_fn).__name__ for part in turned_parts(*given))
    assert torch.equal(*(_gradient(function, given, False) for function in (turned_parts, _apart)))


def test_a_compiled_graph_has_separate_parts(monkeypatch):
    monkeypatch.setattr(turned_heads.torch.compiler, "is_compiling", lambda: True)
    assert not any("TurnedParts" in type(part.grad_fn).__name__ for part in turned_parts(*_given(1)))
