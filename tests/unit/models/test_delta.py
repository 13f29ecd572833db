"""The gated delta rule: torch's chunks, kernels and the cache give the numbers of one token after the other."""

import inspect

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common

from mimo_train.models.blocks.delta import module as rule
from mimo_train.models.documents import Documents

ENDS = (5, 80, 155, 156, 170)
HEADS, KEY, VALUE, CHANNELS = 2, 8, 6, 12


@pytest.fixture
def heads() -> rule.Heads:
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, ENDS[-1], HEADS, KEY, generator=draw, dtype=torch.float64) for _ in range(2))
    value = torch.randn(1, ENDS[-1], HEADS, VALUE, generator=draw, dtype=torch.float64)
    decay, beta = (torch.rand(1, ENDS[-1], HEADS, generator=draw, dtype=torch.float64) for _ in range(2))
    return query, key, value, -decay, beta


def one_by_one(query, key, value, decay, beta) -> torch.Tensor:
    """The rule as written in the paper."""
    query, key = (tensor / (tensor.square().sum(-1, keepdim=True) + 1e-6).sqrt() for tensor in (query, key))
    state, outputs = torch.zeros(len(query), HEADS, KEY, VALUE, dtype=query.dtype), []
    for token in range(query.size(1)):
        q, k, v = (tensor[:, token].unsqueeze(-1) for tensor in (query, key, value))
        state = state * decay[:, token, :, None, None].exp()
        state = state + beta[:, token, :, None, None] * k @ (v - state.mT @ k).mT
        outputs.append((state.mT @ q).squeeze(-1) * KEY**-0.5)
    return torch.stack(outputs, 1)


def by_document(heads: rule.Heads) -> torch.Tensor:
    parts = zip((0, *ENDS[:-1]), ENDS, strict=True)
    return torch.cat([one_by_one(*(tensor[:, first:last] for tensor in heads)) for first, last in parts], 1)


def test_chunks_give_the_numbers_of_the_recurrence_and_its_gradients(heads):
    rows = [tensor.float().requires_grad_() for tensor in heads]
    exact = [tensor.clone().requires_grad_() for tensor in heads]
    weight = torch.randn(1, ENDS[-1], HEADS, VALUE, dtype=torch.float64)
    for documents, expected in ((None, one_by_one(*exact)), (Documents(ENDS), by_document(exact))):
        output = rule.apply_rule(tuple(rows), documents)
        assert (output - expected).abs().max() < 1e-6 * expected.abs().max()
        ours = torch.autograd.grad((output * weight).sum(), rows)
        for gradient, other in zip(ours, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
            assert (gradient - other).abs().max() < 5e-6 * other.abs().max()


def test_the_state_goes_on_after_any_token(heads):
    rows = [tensor.float() for tensor in heads]
    whole, last = rule.torch_rule(*rows)
    state, outputs = None, []
    for first, end in ((0, 70), (70, 71), (71, 72), (72, ENDS[-1])):
        output, state = rule.torch_rule(*(tensor[:, first:end] for tensor in rows), state=state)
        outputs.append(output)
    assert torch.allclose(torch.cat(outputs, 1), whole, atol=1e-5) and torch.allclose(state, last, atol=1e-5)


def test_kernels_are_told_where_documents_end(heads, monkeypatch):
    """`fla` computes them with these arguments; here functions of the same form do."""
    rows = tuple(tensor.float() for tensor in heads)
    inputs, weight = torch.randn(1, ENDS[-1], CHANNELS), torch.randn(CHANNELS, 4)
    documents = Documents(ENDS)
    expected = rule.apply_rule(rows, documents), rule.convolve(inputs, weight, documents)

    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        assert use_qk_l2norm_in_kernel and cu_seqlens.tolist() == [0, *ENDS]
        return by_document((q, k, v, g, beta)), None

    def causal_conv1d(x, weight, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None):
        assert activation == "silu" and cu_seqlens.tolist() == [0, *ENDS]
        parts = x.tensor_split(cu_seqlens[1:-1].tolist(), 1)
        return torch.cat([rule.torch_convolution(part, weight) for part in parts], 1), None

    monkeypatch.setattr(rule, "fallback_reason", lambda: "")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for kernel in (chunk_gated_delta_rule, causal_conv1d):
        known = getattr(common, kernel.__name__)
        if known is not None:  # with `fla`: it has these arguments
            assert inspect.signature(kernel).parameters.keys() <= inspect.signature(known).parameters.keys()
        monkeypatch.setattr(common, kernel.__name__, kernel)
    assert torch.allclose(rule.apply_rule(rows, documents), expected[0], atol=1e-5)
    assert torch.allclose(rule.convolve(inputs, weight, documents), expected[1], atol=1e-6)
