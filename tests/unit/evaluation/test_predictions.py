"""Rows of predictions.jsonl."""

import json

import torch

from data.collate import collate, to_sample
from data.records.records import parse_record
from data.text.tokens import build_tokenizer
from mimo_train.evaluation.predictions import predictions_of

TOKENIZER = build_tokenizer("bytes")


def sample(turns: list[tuple[str, str]], length: int = 80):
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    conversation = parse_record(json.dumps(record).encode(), "json", "k", {})
    return to_sample(conversation, TOKENIZER, {}, length, 0, "k", keep_text=True)


def rows(*samples, wrong: int | None = None) -> list[dict]:
    """Rows of samples whose predictions are right, but for one label of the first."""
    batch = collate(samples)
    batch |= {"sample_numbers": torch.arange(len(samples)), "questions": [one.questions for one in samples]}
    batch |= {"losses": torch.ones(batch["labels"].shape), "predicted": batch["labels"].clone()}
    if wrong is not None:
        batch["predicted"][0, wrong] = ord("x")
    return list(predictions_of(batch, len(samples), TOKENIZER))


def test_every_turn_has_a_row_with_its_own_question():
    several = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    first = sample(several)
    found = rows(first, sample([("user", "q3"), ("assistant", "a3")]), wrong=first.questions[1][0])
    assert [(one["number"], one["turn"], one["question"], one["truth"]) for one in found] == [
        (0, 0, "q1", "a1"), (0, 1, "q2", "a2"), (1, 0, "q3", "a3"),
    ]  # fmt: skip
    assert [one["exact_match"] for one in found] == [True, False, True] and found[1]["prediction"] == "x2"
    assert [one["answer"] for one in found] == ["a1", "x ...", "a3"]
    assert [one["tokens"] for one in found] == [3, 3, 3]


def test_a_turn_behind_the_end_of_the_sequence_has_no_row():
    several = [("user", "q1"), ("assistant", "a1"), ("user", "q2" * 20), ("assistant", "a2")]
    assert [one["question"] for one in rows(sample(several, 20))] == ["q1"]
