"""Several model chunks a stage, with experts: evaluation and decoding are those of one process."""

import json

import pytest

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.runs import TOLERANCE, USUAL_ADAM, config, train_on_ranks

MODEL = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.num_layers=4",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
    "train.micro_batch_size=4",
    "optim.decay=constant",
    *USUAL_ADAM,
)


def test_chunks_evaluate_and_decode_like_one_process(prose, tmp_path):
    found = {}
    for name, layout in (("one", "language_one"), ("chunks", "language_pp2_vpp2")):
        held_out = (f"data.validation_shards={prose}/held_out", "train.report_samples=2")
        short = ("train.iters=2", "run.seed=7", f"layout={layout}")
        train_on_ranks(config("gpt_tiny", tmp_path / name, prose, *MODEL, *held_out, *short))
        (values,) = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "eval/loss" in line]
        found[name] = values["eval/loss"], json.loads((tmp_path / name / "samples.json").read_text())
    assert found["chunks"][0] == pytest.approx(found["one"][0], rel=TOLERANCE)
    assert len(found["one"][1]) == 2 and any(sample["answer"] for sample in found["one"][1])
    assert found["chunks"][1] == found["one"][1]
