"""Losses without logits on one rank, against their definitions in double precision; parts of the vocabulary are in
`tests/dist/models/test_output_layer.py`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mimo_train.estimate import activations
from mimo_train.models.output.divergence import Lesson, TeacherHead
from mimo_train.models.output.token_losses import token_losses
from mimo_train.models.output.vocabulary import Logits, Vocabulary

TOKENS, ROWS, VOCABULARY, WIDTH = 150, 700, 650, 16
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
OUTSIDE = {0: -100, 1: -1, 2: VOCABULARY, 3: ROWS + 5}
"""Labels that are no token, by their position."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three blocks of rows, the last of them smaller, and two of tokens."""
    monkeypatch.setattr(activations, "BLOCK_BYTES", 1 << 16)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, labels and gradients of the losses."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (torch.randn(ROWS, WIDTH, generator=generator) * 0.6).to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    for position, label in OUTSIDE.items():
        labels[position] = label
    return hidden, weight, labels, torch.rand(TOKENS, generator=generator)


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, logits: Logits) -> torch.Tensor:
    product = hidden.double() @ weight[:VOCABULARY].double().T
    return (logits.softcap * torch.tanh(product / logits.softcap) if logits.softcap else product) / logits.divisor


def entropy_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy; a label that is no token takes the largest logit, as a constant of its gradient."""
    is_token = (labels >= 0) & (labels < VOCABULARY)
    label_logits = logits.gather(1, labels.where(is_token, 0)[:, None])[:, 0].where(is_token, logits.detach().amax(1))
    return logits.logsumexp(1) - label_logits


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("logits", [Logits(), Logits(softcap=2.0), Logits(divisor=3.0), Logits(2.0, 0.5)], ids=str)
def test_losses_and_gradients_are_those_of_logits(logits, frozen):
    hidden, weight, labels, gradients = inputs()
    right = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
    expected = entropy_of(logits_of(*right, logits), labels)
    (expected * gradients).sum().backward()
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
    (losses,) = token_losses(*ours, labels, Vocabulary(ALONE, VOCABULARY, logits))
    (losses * gradients).sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=3e-6)
    for mine, theirs in zip(ours[: 2 - frozen], right, strict=False):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=2e-6)
    assert frozen or not ours[1].grad[VOCABULARY:].any(), "padding has no part"


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_half_precision_is_as_near_as_that_of_stored_logits(frozen):
    hidden, weight, labels, gradients = inputs(torch.bfloat16)
    results = []
    for way in ("exact", "stored", "ours"):
        of = [each.clone().to(torch.float64 if way == "exact" else torch.bfloat16) for each in (hidden, weight)]
        of = [of[0].requires_grad_(), of[1].requires_grad_(not frozen)]
        if way == "ours":
            (losses,) = token_losses(*of, labels, Vocabulary(ALONE, VOCABULARY))
        else:
            losses = entropy_of(
                F.linear(of[0], of[1][:VOCABULARY]).to(torch.promote_types(of[0].dtype, torch.float32)), labels
            )
        (losses * gradients).sum().backward()
        results.append([losses.detach().double(), *(each.grad.double() for each in of if each.requires_grad)])
    exact, stored, ours = results
    for right, theirs, mine in zip(exact, stored, ours, strict=True):
        assert (mine - right).norm() < 1.3 * (theirs - right).norm() + 1e-6 * right.norm()


def test_a_frozen_layer_in_fp16_keeps_gradients_that_only_a_loss_scale_makes_representable():
    hidden, weight, labels, _ = inputs()
    labels, scale = labels % VOCABULARY, 2.0**16
    weight = (weight * 1e-6).half()
    ours = hidden.half().requires_grad_()
    (losses,) = token_losses(ours, weight, labels, Vocabulary(ALONE, VOCABULARY))
    (losses * scale).sum().backward()
    right = hidden.half().double().requires_grad_()
    entropy_of(logits_of(right, weight, Logits()), labels).sum().backward()
    assert (ours.grad.double() / scale - right.grad).norm() < 0.05 * right.grad.norm()


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("kind", ["trained", "frozen", "taught", "predicts"])
def test_no_tensor_has_all_tokens_and_the_whole_vocabulary(kind):
    tokens, rows = 1024, 1024
    hidden, weight = torch.randn(tokens, 8), torch.randn(rows, 8, requires_grad=kind in ("trained", "taught"))
    lesson = Lesson(head(3, rows=rows, width=8), torch.randn(tokens, 8)) if kind == "taught" else None
    vocabulary, labels = Vocabulary(ALONE, rows), torch.arange(tokens)
    with Largest() as largest, torch.set_grad_enabled(kind != "predicts"):
        hidden.requires_grad_(kind != "predicts")
        losses = token_losses(hidden, weight, labels, vocabulary, lesson=lesson, predicts=kind == "predicts")
        if kind != "predicts":
            losses.sum().backward()
    assert 0 < largest.elements <= tokens * 256, "a block has at least 256 rows, or 128 tokens"


def test_predictions_are_the_lowest_of_the_most_likely_tokens():
    hidden, weight, labels, _ = inputs()
    weight[5] *= 5
    weight[640] = weight[300] = weight[5]  # equal in three blocks
    weight[699] = 100 * weight[5]  # padding
    hidden[:40] = 10 * weight[5]
    losses, predicted = token_losses(hidden, weight, labels, Vocabulary(ALONE, VOCABULARY), predicts=True)
    expected = logits_of(hidden, weight, Logits())
    assert torch.equal(predicted[:40], torch.full((40,), 5.0))
    assert torch.equal(predicted.long(), expected.argmax(1))
    torch.testing.assert_close(
        losses.double(), entropy_of(expected, labels), rtol=1e-6, atol=1e-6 * float(expected.max())
    )
    with pytest.raises(AssertionError, match="no gradient"):
        token_losses(hidden.requires_grad_(), weight, labels, Vocabulary(ALONE, VOCABULARY), predicts=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_fused_gradient_is_added_to_that_of_earlier_microbatches(tied):
    """As Megatron-Core's wrapper expects it: autograd gets zeros where it adds the embedding's gradient."""
    hidden, weight, labels, gradients = inputs()
    plain, fused = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    fused.main_grad, fused.grad_added_to_main_grad, fused.zero_out_wgrad = torch.ones_like(weight), False, tied
    for parameter, adds in ((plain, False), (fused, True)):
        (losses,) = token_losses(hidden, parameter, labels, Vocabulary(ALONE, VOCABULARY), adds_to_main_grad=adds)
        ((losses * gradients).sum() + (parameter[7].sum() if tied else 0)).backward()
    if tied:
        fused.main_grad += fused.grad
    assert fused.grad_added_to_main_grad
    torch.testing.assert_close(fused.main_grad, 1 + plain.grad)


def head(top_k: int, rows: int = VOCABULARY, width: int = 5, **others) -> TeacherHead:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, width, generator=generator)
    options = {"logits": Logits(), "temperature": 1.5} | others
    return TeacherHead(weight, tp_group=ALONE, top_k=top_k, **options)


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    """The definition; all tokens outside of the k most likely ones are one token."""
    log_s, log_t = (F.log_softmax(logits.double() / temperature, -1) for logits in (student, teacher))
    if top_k:
        _, kept = log_t.topk(top_k)
        outside = torch.ones_like(log_t).scatter(1, kept, 0) > 0
        log_s, log_t = (
            torch.cat([each.gather(1, kept), each.masked_fill(~outside, -torch.inf).logsumexp(1, keepdim=True)], 1)
            for each in (log_s, log_t)
        )
    return F.kl_div(log_s, log_t, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("rows", [VOCABULARY, 300], ids=["all tokens", "a teacher with fewer tokens"])
@pytest.mark.parametrize("top_k", [0, 1, 40])
@pytest.mark.parametrize("logits", [Logits(), Logits(2.0, 0.5)], ids=["plain", "capped"])
def test_divergence_and_its_gradient(logits, top_k, rows):
    hidden, weight, labels, gradients = inputs()
    of, taught = head(top_k, rows, logits=logits), torch.randn(TOKENS, 5, generator=torch.Generator().manual_seed(2))
    teacher = of.weight_VH.double() @ taught.double().T
    teacher = (
        logits.softcap * torch.tanh(teacher.T / logits.softcap) if logits.softcap else teacher.T
    ) / logits.divisor
    right = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    student = logits_of(*right, logits)
    expected = torch.stack([entropy_of(student, labels), divergence(student[:, :rows], teacher, 1.5, top_k)])
    weights = torch.stack([gradients, 1 - gradients])
    (expected * weights).sum().backward()
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    losses = token_losses(*ours, labels, Vocabulary(ALONE, VOCABULARY, logits), lesson=Lesson(of, taught))
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=3e-6)
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=5e-6)


def test_top_k_of_the_vocabulary_is_all_of_it():
    hidden, weight, labels, _ = inputs()
    results, taught = [], torch.randn(TOKENS, 5)
    for top_k in (0, VOCABULARY, 10 * VOCABULARY):
        of = hidden.clone().requires_grad_()
        losses = token_losses(of, weight, labels, Vocabulary(ALONE, VOCABULARY), lesson=Lesson(head(top_k), taught))
        losses.sum().backward()
        results.append((losses.detach(), of.grad))
    for values in results[1:]:
        assert all(map(torch.equal, values, results[0]))


def test_stored_logits_give_the_same_losses_and_gradients():
    """Of a class of transformers whose output layer is not all that makes them."""
    hidden, weight, labels, gradients = inputs()
    lesson, results = Lesson(head(3), torch.randn(TOKENS, 5)), []
    for stored in (False, True):
        of = hidden.clone().requires_grad_()
        logits = (F.linear(of, weight[:VOCABULARY]), None) if stored else (of, weight[:VOCABULARY])
        losses = token_losses(*logits, labels, Vocabulary(ALONE, VOCABULARY), lesson=lesson)
        (losses * gradients).sum().backward()
        results.append((losses.detach(), of.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
