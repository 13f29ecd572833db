"""Several model chunks a stage, with experts, also behind a frozen encoder: evaluation and decoding are those of one
process."""

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


CHUNKS = ("modules.language.layout.pp=2", "modules.language.layout.vpp=2")
RUNS = {
    "gpt_tiny": ("layout=language_one", *CHUNKS),
    # Nothing before the language model needs a gradient: features alone are sent.
    "vlm_digits": ("layout=one_process", "placement.mode=disjoint", *CHUNKS),
}
FROZEN = ("modules.images.freeze=[encoder,projector]", "modules.images.layout.dp=1")


@pytest.mark.parametrize("of", RUNS)
def test_chunks_evaluate_and_decode_like_one_process(of, request, tmp_path):
    demo, found = request.getfixturevalue("prose" if of == "gpt_tiny" else "digits"), {}
    one, *chunks = RUNS[of]
    model = (*MODEL, *FROZEN) if of == "vlm_digits" else MODEL
    for name, layout in (("one", [one]), ("chunks", [one, *chunks])):
        held_out = (f"data.validation_shards={demo}/held_out", "train.report_samples=2")
        short = ("train.iters=2", "run.seed=7", *layout)
        train_on_ranks(config(of, tmp_path / name, demo, *model, *held_out, *short))
        (values,) = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "eval/loss" in line]
        found[name] = values["eval/loss"], json.loads((tmp_path / name / "samples.json").read_text())
    assert found["chunks"][0] == pytest.approx(found["one"][0], rel=TOLERANCE)
    assert len(found["one"][1]) == 2 and any(sample["answer"] for sample in found["one"][1])
    assert found["chunks"][1] == found["one"][1]
