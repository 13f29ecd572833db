"""Rotary causal attention over short rows on a CPU has the numbers of torch's kernel."""

import pytest
import torch
import torch.nn.functional as F

from mimo_train.cpu import attention
from mimo_train.cpu.attention import BLOCK
from mimo_train.models.dense_layer import rotate, split_heads

B, G, D = 2, 3, 8


def inputs(positions: int, rows: int, queries: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries with their keys and values, and cosines and sines of positions, of each of `rows` in a batch."""
    torch.manual_seed(2)
    angles = torch.rand(positions, rows, 1, D // 2, dtype=dtype)
    angles = torch.cat([angles, angles], dim=-1)
    sin = angles.sin()
    sin[..., : D // 2].neg_()
    return [torch.randn(positions, B, G, queries + 2, D, dtype=dtype, requires_grad=True), angles.cos(), sin]


# Whole blocks, a last one of one query or of few, and less than a block.
@pytest.mark.parametrize("positions", [2 * BLOCK, 2 * BLOCK + 1, BLOCK + 37, BLOCK - 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("queries", [1, 2])
def test_the_numbers_are_those_of_torchs_kernel(positions, scale, rows, queries):
    mixed, cos, sin = inputs(positions, rows, queries)
    query, key, value = split_heads(mixed)
    parts = (part.permute(1, 2, 0, 3) for part in (rotate(query, cos, sin), rotate(key, cos, sin), value))
    theirs = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=queries > 1)
    theirs = theirs.permute(2, 0, 1, 3).flatten(2)
    ours = attention.rotary_attention(mixed, cos, sin, scale)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    weights = torch.randn(B, positions, G * queries * D).transpose(0, 1)
    gradients = [torch.autograd.grad(each, mixed, weights)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("queries", [1, 2])
def test_gradients_in_double_precision_are_right(monkeypatch, queries):
    monkeypatch.setattr(attention, "BLOCK", 3)
    mixed, *rotation = inputs(7, B, queries, torch.float64)
    assert torch.autograd.gradcheck(lambda mixed: attention.rotary_attention(mixed, *rotation, 0.5), mixed)
