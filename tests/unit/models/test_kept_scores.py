"""Causal attention over short rows on a CPU, whose probabilities are kept: the numbers of torch's kernel."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from mimo_train.estimate.activations import BLOCK, KEPT_SCORES, probability_activations
from mimo_train.models import kept_scores
from mimo_train.models.attention import SdpaAttention
from mimo_train.models.documents import Documents
from mimo_train.models.turned_heads import parts_of, turned
from tests.unit.models.test_neutral import config

B, N, D = 2, 3, 8


def _given(positions: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values; values are a part of a larger tensor, as those of a layer are."""
    torch.manual_seed(1)
    query, key = (2 * torch.randn(positions, B, N, D) for _ in range(2))
    value = torch.randn(positions, B, N, 3, D)[..., 2, :]
    return [part.to(dtype).requires_grad_() for part in (query, key, value)]


def _torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    parts = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    return F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale).permute(2, 0, 1, 3).flatten(2)


# Whole blocks, a last one of one query or of few, and less than a block.
@pytest.mark.parametrize("positions", [2 * BLOCK, 2 * BLOCK + 1, BLOCK + 37, BLOCK - 1])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_numbers_are_those_of_torchs_kernel(positions, scale):
    given = _given(positions)
    ours, theirs = kept_scores.attend_causally(*given, scale), _torchs(*given, scale)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    weights = torch.randn(B, positions, N * D).transpose(0, 1)
    found = [torch.autograd.grad(each, given, weights) for each in (ours, theirs)]
    for pair in zip(*found, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=3e-5)


def test_gradients_in_double_precision_are_right(monkeypatch):
    monkeypatch.setattr(kept_scores, "BLOCK", 3)
    given = _given(7, torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: kept_scores.attend_causally(*parts, 0.5), given)
    mixed, *turns = _mixed(7, B, torch.float64)
    assert torch.autograd.gradcheck(lambda mixed: kept_scores.attend_turned(mixed, *turns, 0.5), mixed)


def _mixed(positions: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values beside each other, cosines and sines of positions, in `rows` of a batch their own."""
    torch.manual_seed(2)
    angles = torch.rand(positions, rows, 1, D // 2, dtype=dtype)
    angles = torch.cat([angles, angles], dim=-1)
    sin = angles.sin()
    sin[..., : D // 2].neg_()
    return [torch.randn(positions, B, N, 3, D, dtype=dtype, requires_grad=True), angles.cos(), sin]


@pytest.mark.parametrize("positions", [2 * BLOCK, 2 * BLOCK + 1, BLOCK - 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("rows", [1, B])
def test_parts_that_are_turned_together_have_the_numbers_of_those_that_are_turned_apart(positions, scale, rows):
    mixed, cos, sin = _mixed(positions, rows)
    query, key, value = parts_of(mixed)
    ours = kept_scores.attend_turned(mixed, cos, sin, scale)
    theirs = _torchs(turned(query, cos, sin), turned(key, cos, sin), value, scale)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    weights = torch.randn(B, positions, N * D).transpose(0, 1)
    (own,), (other,) = (torch.autograd.grad(each, mixed, weights) for each in (ours, theirs))
    torch.testing.assert_close(own, other, rtol=1e-5, atol=3e-5)


def test_a_gradient_of_the_gradient_of_what_is_turned_is_refused():
    mixed, *turns = _mixed(70)
    (first,) = torch.autograd.grad(
        kept_scores.attend_turned(mixed, *turns, None).square().sum(), mixed, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_gradient_of_the_gradient_is_refused():
    given = _given(96)
    context = kept_scores.attend_causally(*given, None)
    (first, *_) = torch.autograd.grad(context.square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("turns", [False, True])
def test_what_is_kept_is_what_the_plan_counts(turns):
    given, kept = _mixed(150) if turns else _given(150), []
    attend = kept_scores.attend_turned if turns else kept_scores.attend_causally
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        attend(*given, None)
    own = [one.nbytes for one in kept if one.shape[-1] != D]
    assert len(own) == 5 and sum(own) == probability_activations(150, B, N)


def _layer(mask: AttnMaskType = AttnMaskType.causal, **options) -> SdpaAttention:
    groups = SimpleNamespace(cp=None)
    return SdpaAttention(config(**{"attention_dropout": 0.0} | options), 1, mask, "self", pg_collection=groups)


@pytest.mark.parametrize("positions", [KEPT_SCORES[0] - 1, KEPT_SCORES[0], KEPT_SCORES[-1], KEPT_SCORES[-1] + 1])
def test_rows_of_a_layer_that_are_neither_short_nor_long_keep_theirs(positions):
    context = _layer()(*_given(positions))
    assert (type(context.grad_fn).__name__ == "_CausalBackward") == (positions in KEPT_SCORES)


def _is_torchs(layer: SdpaAttention, parts: list[torch.Tensor], **options) -> bool:
    return type(layer(*parts, **options).grad_fn).__name__ != "_CausalBackward"


def test_everything_else_is_computed_by_torch(monkeypatch):
    parts = _given(128)
    assert _is_torchs(_layer(AttnMaskType.no_mask), parts)
    assert _is_torchs(_layer(attention_dropout=0.1), parts)
    assert not _is_torchs(_layer(attention_dropout=0.1).eval(), parts)
    assert _is_torchs(_layer(), _given(128, torch.bfloat16))
    query, *others = parts
    assert _is_torchs(_layer(), [query, *(part[:, :, :1] for part in others)]), "grouped queries"
    assert _is_torchs(_layer(), [query[:100], *others]), "earlier positions come from a cache"
    monkeypatch.setattr(kept_scores.torch.compiler, "is_compiling", lambda: True)
    assert _is_torchs(_layer(), parts)


def test_turning_and_attending_are_one_where_nothing_else_is_to_be_done(monkeypatch):
    mixed, cos, sin = _mixed(128)
    context = _layer().attend_turned(mixed, cos, sin, None)
    parts = [turned(part, cos, sin) for part in parts_of(mixed)[:2]]
    torch.testing.assert_close(context, _layer()(*parts, parts_of(mixed)[2]), rtol=1e-5, atol=5e-6)

    def is_apart(layer: SdpaAttention, mixed=mixed, cos=cos, packed=None) -> bool:
        return layer.attend_turned(mixed, cos, sin, packed) is None

    assert is_apart(_layer(AttnMaskType.no_mask)) and is_apart(_layer(window_size=(5, 0)))
    assert is_apart(_layer(attention_dropout=0.1)) and not is_apart(_layer(attention_dropout=0.1).eval())
    assert is_apart(_layer(), packed=Documents([100, 128])), "packed rows"
    assert is_apart(_layer(), mixed.bfloat16()) and is_apart(_layer(), mixed[:50])
    assert is_apart(_layer(), torch.cat([mixed, mixed[..., :1, :]], dim=3)), "grouped queries"
    assert is_apart(_layer(), cos=cos[..., : D // 2]), "of a head some channels are turned"
    capped = _layer()
    capped.softcap = 30.0
    assert is_apart(capped)
    split = _layer()
    split.cp_group = object()
    assert is_apart(split)
    monkeypatch.setattr(kept_scores.torch.compiler, "is_compiling", lambda: True)
    assert is_apart(_layer())
