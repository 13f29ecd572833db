"""The divergence of distillation, on one rank; `tests/dist/training/test_distill.py` has parts of the vocabulary."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mimo_train.models import divergence
from mimo_train.models.divergence import Lesson, TeacherHead

TOKENS, VOCABULARY, WIDTH = 7, 13, 5
ALONE = SimpleNamespace(size=lambda: 1)


def head(top_k: int, rows: int = VOCABULARY, **others) -> TeacherHead:
    torch.manual_seed(0)
    weight = torch.randn(rows, WIDTH)
    options = {"softcap": 0.0, "divisor": 1.0, "temperature": 1.5} | others
    return TeacherHead(weight, rows, tp_group=ALONE, top_k=top_k, **options)


def plain(student: torch.Tensor, teacher: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    """The definition, in double precision; all tokens outside of the k most likely ones are one token."""
    log_s, log_t = (F.log_softmax(logits.double() / temperature, -1) for logits in (student, teacher))
    if top_k:
        _, kept = log_t.topk(top_k)
        outside = torch.ones_like(log_t).scatter(1, kept, 0) > 0
        log_s, log_t = (
            torch.cat([each.gather(1, kept), each.masked_fill(~outside, -torch.inf).logsumexp(1, keepdim=True)], 1)
            for each in (log_s, log_t)
        )
    return F.kl_div(log_s, log_t, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("top_k", [0, 1, 4, VOCABULARY - 1])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_divergence_and_its_gradient(top_k, softcap):
    of = head(top_k, softcap=softcap, divisor=0.5)
    student, hidden = torch.randn(TOKENS, VOCABULARY, requires_grad=True), torch.randn(TOKENS, WIDTH)
    logits = hidden @ of.weight_VH.T
    teacher = (2 * torch.tanh(logits / 2) if softcap else logits) / 0.5
    ours, weights = of.divergence(student, hidden), torch.rand(TOKENS)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), student)
    expected = plain(student, teacher, 1.5, top_k)
    (by_torch,) = torch.autograd.grad((expected * weights.double()).sum(), student)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, by_torch, rtol=1e-5, atol=1e-6)


def test_top_k_of_the_vocabulary_is_all_of_it():
    student, hidden = torch.randn(TOKENS, VOCABULARY, requires_grad=True), torch.randn(TOKENS, WIDTH)
    found = []
    for top_k in (0, VOCABULARY, 10 * VOCABULARY):
        losses = head(top_k).divergence(student, hidden)
        found.append((losses, *torch.autograd.grad(losses.sum(), student)))
    for values in found[1:]:
        assert all(map(torch.equal, values, found[0]))


def test_rows_of_the_vocabulary_that_a_teacher_lacks_do_not_count():
    student, hidden = torch.randn(TOKENS, VOCABULARY), torch.randn(TOKENS, WIDTH)
    of = head(0, rows=VOCABULARY - 3)
    expected = plain(student[:, :-3], hidden @ of.weight_VH.T, 1.5, 0)
    torch.testing.assert_close(of.divergence(student, hidden).double(), expected, rtol=1e-5, atol=1e-6)


class Kept:
    """Shapes of the tensors that autograd keeps."""

    def __init__(self):
        self.shapes: list[torch.Size] = []

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.shapes.append(value.shape)
        return value


def test_chunks_change_nothing_and_keep_no_logits(monkeypatch):
    """Tensors that autograd keeps are no larger than a chunk of logits."""
    weight, labels = torch.randn(VOCABULARY, WIDTH, requires_grad=True), torch.arange(TOKENS)
    own, teacher = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, WIDTH)
    found = []
    for tokens in (TOKENS, 2):
        monkeypatch.setattr(divergence, "CHUNK", tokens * VOCABULARY)
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda value: value):
            losses = Lesson(head(3), teacher).losses(
                own,
                lambda rows: rows @ weight.T,
                labels,
                lambda labels, logits: F.cross_entropy(logits, labels, reduction="none"),
            )
        found.append((losses, *torch.autograd.grad(losses.sum(), (own, weight))))
        if tokens < TOKENS:
            assert not any(shape[-1:] == (VOCABULARY,) for shape in kept.shapes), kept.shapes
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(whole, chunked)
