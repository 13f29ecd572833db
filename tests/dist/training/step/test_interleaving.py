"""Several model chunks a stage, and experts: evaluation, decoding and checkpoints are those of one process."""

import json
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.runs import TOLERANCE, USUAL_ADAM, config, curve, largest_difference, train_on_ranks

MODEL = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.num_layers=4",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
    "train.micro_batch_size=4",
    "optim.decay=constant",
)
CHUNKS, EXPERT_PARALLEL = ("layout=language_pp2_vpp2",), ("layout=language_ep2",)
OTHERS = {
    "one process": ("layout=language_one",),
    "ep2 of dp2": EXPERT_PARALLEL,
    "tp2 etp2": ("layout=language_tp2", "modules.language.layout.sp=true", "modules.language.layout.etp=2"),
}
SAVED, LAST = 3, 6


def run_config(prose: Path, run_dir: Path, *overrides: str):
    """A run of a few steps that saves in the middle."""
    return config(
        "gpt_tiny", run_dir, prose, *MODEL, f"train.iters={LAST}", f"checkpoint.save_interval={SAVED}", *overrides
    )


@pytest.fixture(scope="module")
def interleaved(prose, tmp_path_factory) -> tuple[Path, list[tuple]]:
    """Folder and curve of a run in two stages of two chunks."""
    folder = tmp_path_factory.mktemp("interleaved")
    return folder, curve(train_on_ranks(run_config(prose, folder, *CHUNKS)))


def require_continued(whole: list[tuple], run_dir: Path, prose: Path, folder: Path, *layout: str) -> None:
    """Fails unless a run that resumes in the middle of `whole` gives the rest of it."""
    resume = f"checkpoint.resume={folders.step_folder(run_dir, SAVED)}"
    lines = curve(train_on_ranks(run_config(prose, folder, *layout, resume)))
    assert [line[0] for line in lines] == list(range(SAVED + 1, LAST + 1))
    loss, norm = largest_difference(whole[SAVED:], lines)
    assert max(loss, norm) < TOLERANCE, f"loss {loss:.1e}, gradient norm {norm:.1e}"


@pytest.mark.parametrize("layout", OTHERS.values(), ids=OTHERS.keys())
def test_checkpoint_of_chunks_continues_at_another_layout(layout, interleaved, prose, tmp_path):
    run_dir, whole = interleaved
    require_continued(whole, run_dir, prose, tmp_path, *layout)


def test_checkpoint_of_chunks_continues_bitwise_at_its_own_layout(interleaved, prose, tmp_path):
    run_dir, whole = interleaved
    resume = f"checkpoint.resume={folders.step_folder(run_dir, SAVED)}"
    assert curve(train_on_ranks(run_config(prose, tmp_path, *CHUNKS, resume))) == whole[SAVED:]


def test_checkpoint_of_expert_parallel_ranks_continues_in_chunks(prose, tmp_path):
    whole = curve(train_on_ranks(run_config(prose, tmp_path / "whole", *EXPERT_PARALLEL)))
    require_continued(whole, tmp_path / "whole", prose, tmp_path / "chunks", *CHUNKS)


def test_chunks_evaluate_and_decode_like_one_process(prose, tmp_path):
    found = {}
    for name, layout in (("one", OTHERS["one process"]), ("chunks", CHUNKS)):
        held_out = (f"data.validation_shards={prose}/held_out", "train.report_samples=2")
        short = ("train.iters=2", "run.seed=7", *USUAL_ADAM)
        train_on_ranks(run_config(prose, tmp_path / name, *layout, *held_out, *short))
        (values,) = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "eval/loss" in line]
        found[name] = values["eval/loss"], json.loads((tmp_path / name / "samples.json").read_text())
    assert found["chunks"][0] == pytest.approx(found["one"][0], rel=TOLERANCE)
    assert len(found["one"][1]) == 2 and any(sample["answer"] for sample in found["one"][1])
    assert found["chunks"][1] == found["one"][1]
