"""Held-out sets with their own intervals, the best checkpoints, and runs that end early; also killed and resumed."""

import json
import os
import re

import pytest

from mimo_train.checkpoint import folders
from mimo_train.cli import main
from mimo_train.config.compose import to_yaml
from mimo_train.logging import progress
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.training.callbacks import Callback
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config, curve, train_rank

WATCHED = "eval/other/loss"
# The loss falls, so that with mode=max the first evaluation is the best, and no later one improves it.
WATCH = (
    f"checkpoint.keep_best={{metric: {WATCHED}, mode: max, count: 1}}",
    f"train.stop_early={{metric: {WATCHED}, mode: max, patience: 3}}",
)


def run_config(digits, run_dir, *overrides):
    """A run of 20 steps with three sets that saves every 4 steps and keeps the newest checkpoint."""
    sets = (
        f"data.validation_shards={digits}/held_out",
        f"data.validation={{other: {{shards: {digits}/held_out, interval: 2, samples: 8}}}}",
        f"data.test={{last: {{shards: {digits}/held_out, samples: 5}}}}",
    )
    usual = ("train.iters=20", "train.eval_interval=6", "train.eval_samples=4", "checkpoint.save_interval=4")
    return config("vlm_digits", run_dir, digits, *sets, *usual, "checkpoint.keep=1", *overrides)


class DieAtEvaluation(Callback):
    """Ends this process without any clean-up, after the values are written and before they are acted on."""

    step = 0

    def on_evaluation(self, state, values):
        if state.train_state.step == self.step:
            os._exit(9)


def train_and_die(cfg, step: int) -> int:
    from mimo_train.training.pretrain import pretrain

    callback = DieAtEvaluation()
    callback.step = step
    return pretrain(cfg, callbacks=[callback])


def left(run_dir):
    """What a run has left: evaluations, losses, saved steps, the best one and the end."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    evaluations = [{key: value for key, value in line.items() if "/" in key} for line in lines if "lm loss" not in line]
    steps = [folders.step_in(folder) for folder in folders.complete(run_dir)]
    best = folders.in_folder(run_dir / "checkpoints" / "best", "KEY")
    return {
        "losses": [line["lm loss"] for line in lines if "lm loss" in line],
        "evaluations": evaluations,
        "steps": steps,
        "best": folders.step_in(best),
        "end": [event.facts for event in progress.events(run_dir) if event.kind == progress.EXIT][-1],
    }


@pytest.fixture(scope="module")
def uninterrupted(digits, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    assert run_ranks(train_rank, 2, run_config(digits, run_dir, *WATCH, "layout=two_processes")) == [0, 0]
    return run_dir, left(run_dir)


def test_sets_have_their_own_intervals_and_a_run_without_improvement_ends(uninterrupted):
    run_dir, run = uninterrupted
    lines = read_metrics(run_dir / "metrics.jsonl")
    by_key = {
        key: [line["step"] for line in lines if key in line]
        for key in ("eval/loss", "eval/other/loss", "test/last/loss")
    }
    # At the end, which comes early, all sets are evaluated.
    assert by_key == {"eval/loss": [6, 8], "eval/other/loss": [2, 4, 6, 8], "test/last/loss": [8]}
    counts = {key: line[key] for line in lines for key in line if key.endswith("/samples")}
    assert counts == {"eval/samples": 4, "eval/other/samples": 8, "test/last/samples": 5}
    assert (run_dir / "predictions_other.jsonl").exists() and (run_dir / "test_predictions_last.jsonl").exists()
    value = next(line[WATCHED] for line in lines if WATCHED in line)
    assert run["end"] == {
        "step": "8",
        "reason": "finished",
        "stop_early": f"{WATCHED} has not improved for 3 evaluations (best {value:.6g} at step 2)",
    }


def test_the_best_checkpoint_is_kept_next_to_the_newest_and_named(uninterrupted, capsys):
    run_dir, run = uninterrupted
    assert (run["steps"], run["best"]) == ([2, 8], 2)
    named = json.loads((run_dir / "checkpoints" / "best").read_text())
    assert (named["metric"], named["mode"], named["best"][0]["step"]) == (WATCHED, "max", 2)
    reasons = {
        event.facts["step"]: event.facts["reason"] for event in progress.events(run_dir) if event.kind == "checkpoint"
    }
    assert reasons["2"] == "keep_best" and reasons["4"] == "save_interval"
    assert main(["checkpoint", "show", str(run_dir / "checkpoints" / "best")]) == 0
    assert capsys.readouterr().out.startswith(str(run_dir / "checkpoints" / "step_00000002"))


@pytest.mark.parametrize(
    "case", ["stopped between evaluations, on another layout", "killed at a saved step", "killed at the end"]
)
def test_a_resumed_run_leaves_what_an_uninterrupted_one_does(case, uninterrupted, digits, tmp_path):
    cfg = run_config(digits, tmp_path, *WATCH, "layout=two_processes")
    if case.startswith("stopped"):
        run_ranks(train_rank, 1, run_config(digits, tmp_path, *WATCH, "layout=one_process", "train.exit_interval=5"))
    else:
        step = {"killed at a saved step": 4, "killed at the end": 8}[case]
        with pytest.raises(RankFailure, match="died"):
            run_ranks(train_and_die, 2, cfg, step)
    run_ranks(train_rank, 2, cfg)
    expected, resumed = uninterrupted[1], left(tmp_path)
    if case.startswith("stopped"):  # equal but for the order of sums
        assert resumed.pop("losses") == pytest.approx(expected["losses"], rel=1e-5)
        assert [*map(list, resumed.pop("evaluations"))] == [*map(list, expected["evaluations"])]
        assert resumed["end"].pop("stop_early")[:60] == expected["end"]["stop_early"][:60]
    assert resumed.pop("end").items() <= expected["end"].items()
    assert resumed == {key: expected[key] for key in resumed}
    if case == "killed at the end":  # another start has nothing to do
        before = (tmp_path / "metrics.jsonl").read_bytes()
        run_ranks(train_rank, 2, cfg)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before and left(tmp_path)["steps"] == [2, 8]


def half_lengths(predictions, references):
    """A metric of the user: two numbers of each prediction."""
    assert len(predictions) == len(references)
    return {"length": [len(text) / 2 for text in predictions], "any": float(any(predictions))}


def test_metrics_of_generated_answers_are_those_of_the_predictions_and_change_no_training(tmp_path):
    """On questions about images and audio."""
    from data.demo.make import make_demo

    jiwer = pytest.importorskip("jiwer")
    demo = make_demo(tmp_path / "mixed", "mixed", train_samples=48, held_out_samples=16, shards=1)
    metrics = f"[accuracy, wer, wer_normalized, {__name__}:half_lengths]"
    sets = f"data.validation={{other: {{shards: {demo}/held_out, interval: 2, samples: 16, metrics: {metrics}}}}}"
    shared = tuple(f"modules.{name}.layout.dp=2" for name in ("images", "audio", "language"))
    usual = ("train.iters=4", "optim.lr=0.1", "modules.language.llm.dropout=0.1", "data.pack=true", *shared)
    plain = config("mixed_tiny", tmp_path / "plain", demo, *usual)
    watch = "checkpoint.keep_best={metric: eval/other/half_lengths/length, mode: max}"
    with_metrics = config("mixed_tiny", tmp_path / "metrics", demo, *usual, sets, watch)
    for cfg in (plain, with_metrics):
        run_ranks(train_rank, 2, cfg)
    lines = read_metrics(tmp_path / "metrics" / "metrics.jsonl")
    assert curve(lines) == curve(read_metrics(tmp_path / "plain" / "metrics.jsonl"))
    values = [line for line in lines if "eval/other/loss" in line][-1]
    entries = [json.loads(line) for line in (tmp_path / "metrics" / "predictions_other.jsonl").read_text().splitlines()]
    of = {
        "accuracy": [entry["answer"] == entry["truth"].strip() for entry in entries],
        "half_lengths/length": [len(entry["answer"]) / 2 for entry in entries],
    }
    for name, each in of.items():
        assert values[f"eval/other/{name}"] == pytest.approx(sum(each) / len(each)), name
    assert any(of["half_lengths/length"]) and values["eval/other/half_lengths/any"] == 1
    assert values["eval/other/exact_match"] == values["eval/other/accuracy"] and len(entries) >= 16
    assert any("tone" in entry["question"] for entry in entries)
    truths, answers = ([entry[name] for entry in entries] for name in ("truth", "answer"))
    assert values["eval/other/wer"] == pytest.approx(jiwer.wer(truths, answers))
    plain_words = [[re.sub(r"[^a-z0-9 ]", " ", text.lower()) for text in texts] for texts in (truths, answers)]
    assert values["eval/other/wer_normalized"] == pytest.approx(jiwer.wer(*plain_words))


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["train.eval_metrics=[accuracy]"], "train.eval_metrics: needs generated answers. placement: modules.images"),
        (
            ["train.eval_metrics=[acuracy]", "layout=one_process"],
            "error: train.eval_metrics: no metric 'acuracy'. Did",
        ),
    ],
)
def test_metrics_that_cannot_be_computed_are_an_error_before_training(overrides, error, digits, tmp_path, capsys):
    cfg = run_config(digits, tmp_path, "layout=two_processes", *overrides)
    (tmp_path / "run.yaml").write_text(to_yaml(cfg))
    assert main(["check", str(tmp_path / "run.yaml")]) == 1
    assert error in "".join(capsys.readouterr())


def test_a_metric_that_no_evaluation_gives_ends_the_run_at_the_first_one(digits, tmp_path):
    watch = "checkpoint.keep_best={metric: eval/other/anls, mode: max}"
    with pytest.raises(RankFailure, match=r"checkpoint.keep_best.metric: no evaluation gives eval/other/anls"):
        run_ranks(train_rank, 2, run_config(digits, tmp_path, watch, "layout=two_processes"))
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 2
