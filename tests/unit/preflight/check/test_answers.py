"""What is computed from a config counts every answer of a sample in the language model, and its media once."""

import numpy as np
import pytest

from data.order.step import StepSamples
from mimo_train.config.tasks import TASKS, TaskTraits
from mimo_train.estimate.devices import DEVICES
from mimo_train.estimate.memory import stage_memory
from mimo_train.layout.batch import pack_length, packing_faults
from mimo_train.layout.run import resolve
from mimo_train.preflight.check.report import Report
from mimo_train.preflight.check.tables import add_batch, flops_of_ranks
from mimo_train.preflight.plan.data_shares import shares_of
from mimo_train.preflight.plan.search import Request, plan
from tests.unit.configs import load

ROWS, MEDIA = 384, {"images": 1.0}
ONE_ANSWER = ("train.global_batch_size=32", "train.micro_batch_size=4", "train.iters=800")
TWO_ANSWERS = ("train.global_batch_size=16", "train.micro_batch_size=2", "train.iters=800")


def counted(name: str, batch: tuple[str, ...], *overrides: str) -> dict:
    """Numbers of the language model."""
    cfg = load(name, *batch, *overrides)
    run = resolve(cfg)
    memory = [stage.memory for stage in stage_memory(run, "language", ROWS)]
    flops = sum(of_rank.get("language", 0) for of_rank in flops_of_ranks(run, ROWS, MEDIA).values())
    request = Request(2, 8, DEVICES["l40s"], ROWS, {module: MEDIA[module] for module in cfg.encoders}, top=1)
    report = Report()
    add_batch(report, run)
    tokens = next(row[1] for row in report.tables[0].rows if row[0] == "tokens")
    seconds = plan(cfg, request).proposals[0].prediction.seconds if not cfg.encoders else 0.0
    return {"memory": memory, "flops": flops, "pack": pack_length(cfg), "seconds": seconds,
            "tokens": tokens.partition(" a step")[0]}  # fmt: skip


@pytest.mark.parametrize("overrides", [(), ("data.pack=true",), ("data.pad=sequence",)])
@pytest.mark.parametrize("name", ["gpt_tiny", "vlm_digits"])
def test_two_answers_cost_the_language_model_as_two_samples(name, overrides, monkeypatch):
    expected = counted(name, ONE_ANSWER, *overrides)
    encoder = stage_memory(resolve(load("vlm_digits", *TWO_ANSWERS)), "images", ROWS)
    monkeypatch.setitem(TASKS, "sft", TaskTraits(form="pairs"))
    assert counted(name, TWO_ANSWERS, *overrides) == expected
    assert stage_memory(resolve(load("vlm_digits", *TWO_ANSWERS)), "images", ROWS) == encoder


def test_a_packed_row_holds_all_answers(monkeypatch):
    cfg = load("gpt_tiny", "data.pack=true", "data.sequence_length=64", "data.pack_length=100")
    assert not [*packing_faults(cfg)]
    monkeypatch.setitem(TASKS, "sft", TaskTraits(form="labels"))
    (fault,) = packing_faults(cfg)
    assert fault.key == "data.pack_length" and "longest sample, of 2 x data.sequence_length 64" in str(fault)


@pytest.mark.parametrize("rows", ["data.pad=sequence", "data.pad=microbatch", "data.pack=true"])
def test_shares_of_data_are_of_all_answers(rows, monkeypatch):
    monkeypatch.setitem(TASKS, "sft", TaskTraits(form="pairs"))
    cfg = load("gpt_tiny", *TWO_ANSWERS, "data.sequence_length=128", rows)
    shares = []
    for length in (128, 32):
        documents = [np.array([length, length // 2])] * 16
        samples = StepSamples({}, {}, {}, np.sum(documents, axis=1), documents)
        shares.append(shares_of(cfg, ROWS, {}, [samples]))
    assert [share.tokens for share in shares] == pytest.approx([0.75, 0.1875])
    if rows == "data.pad=microbatch":
        assert shares[0].work["language"] == pytest.approx(1) and 0.2 < shares[1].work["language"] < 0.26
    elif rows == "data.pack=true":
        assert 0.7 < shares[0].work["language"] < 0.8 and 0.15 < shares[1].work["language"] < 0.2
