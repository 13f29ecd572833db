"""Both models of a distillation must learn the same tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.order.step import Microbatch
from data.order.step_plan import Share, StepPlan
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.training.tasks.distill import Distill
from mimo_train.training.teacher import exchange
from mimo_train.training.teacher.source import require_one_vocabulary
from mimo_train.training.teacher.steps import TaughtSteps

DATASET = SimpleNamespace(locate=lambda number: ("train.tar", f"key{number}"))
TOKENIZER = SimpleNamespace(shown=lambda ids: chr(ids[0]))


def counts(monkeypatch, student: list[str], teacher: list[str], bad: tuple[int, ...] = ()) -> list[int]:
    """On one process, of samples that are read from number 10 on."""
    monkeypatch.setattr(exchange, "_sum", lambda numbers, _device: numbers)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(exchange.dist, "all_gather_object", lambda sides, side: sides.__setitem__(0, side))
    sides = [
        {place: np.array([ord(letter) for letter in text], dtype=np.int64) for place, text in enumerate(texts)}
        for texts in (student, teacher)
    ]
    flags = torch.tensor([int(place in bad) for place in range(len(student))])
    step = SimpleNamespace(size=len(student), first_sample=10)
    meeting = exchange.Meeting(DATASET, TOKENIZER, TOKENIZER)
    return meeting.counts(step, *sides, flags).tolist()


def test_the_student_s_tokens_may_end_earlier(monkeypatch):
    assert counts(monkeypatch, ["abc", "ab", ""], ["abc", "abcd", "x"]) == [3, 2, 0]


def test_bad_samples_have_none(monkeypatch):
    assert counts(monkeypatch, ["abc", "ab"], ["x", "ab"], bad=(0,)) == [0, 2]


WRONG = {
    "learned token 2 of sample 'key11' of train.tar is 98 ('b') for the student, and 120 ('x') for the teacher": "axc",
    "distill.sequence_length: sample 'key11' of train.tar has 3 learned tokens for the student, and only 2": "ab",
}


@pytest.mark.parametrize("message", WRONG)
def test_other_tokens_are_an_error(message, monkeypatch):
    with pytest.raises(UserError) as raised:
        counts(monkeypatch, ["same", "abc"], ["same", WRONG[message]])
    assert message in str(raised.value)


def test_a_packed_row_of_padding_alone_takes_any_row_of_the_teacher():
    none, labels = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)
    microbatch = Microbatch(sample_numbers=none, loss_mask=torch.zeros(1, 8), labels=labels)
    plan = StepPlan(10, 1, ((Share(none.numpy(), 8),),), np.array([5]), packed=True)
    cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    pipeline = SimpleNamespace(groups=SimpleNamespace(collections={"language": SimpleNamespace(cp=cp)}))
    current = SimpleNamespace(microbatches=[microbatch], plan=plan, first_sample=10)
    steps = SimpleNamespace(current=current, _pipeline=pipeline, _starts={})
    assert TaughtSteps._rows_of(steps, 0).tolist() == [0]


def test_other_vocabularies_are_an_error():
    teacher, student = (SimpleNamespace(vocabulary_fingerprint=size, text_size=size) for size in (259, 262))
    require_one_vocabulary(student, student)
    with pytest.raises(ConfigError, match=r"distill.teacher: its tokenizer \(259 tokens\) is not data.tokenizer \(262"):
        require_one_vocabulary(teacher, student)


def test_the_loss_weighs_divergence_and_cross_entropy_and_reports_sources():
    distill = SimpleNamespace(weight=0.25, temperature=2.0)
    mix = [SimpleNamespace(name="a", shards="a"), SimpleNamespace(name="b", shards="b")]
    task = Distill(SimpleNamespace(distill=distill, data=SimpleNamespace(mix=mix)))
    entropy, divergence = torch.tensor([[3.0, 5.0, 7.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    batch = {"loss_mask": torch.tensor([[1.0, 1.0, 0.0]]), "sources": torch.tensor([[0, 1, 1]])}
    loss, tokens, report = task(batch, None, torch.stack([entropy, divergence]))
    assert (loss.item(), tokens.item()) == (0.25 * 4 * 3 + 0.75 * 8, 2)
    sums = {name: values.tolist() for name, values in report.items()}
    assert sums == {"loss": [9, 2], "kl": [3, 2], "lm loss": [8, 2], "loss/a": [3.25, 1], "loss/b": [5.75, 1]}
