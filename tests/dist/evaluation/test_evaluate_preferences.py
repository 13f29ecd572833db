"""`mimo-train evaluate` of runs of other tasks than sft: the numbers of the evaluation in training, at any layout."""

import json
from pathlib import Path

import pytest

from data.demo.make import make_demo
from mimo_train.config.compose import load
from tests.dist.commands import command
from tests.dist.hf import models
from tests.dist.hf.one_step import overrides
from tests.dist.pairs import write_pairs
from tests.dist.ranks import run_ranks
from tests.dist.runs import USUAL_ADAM, config

RUNS: dict[str, tuple[str, ...]] = {
    "dpo": ("vlm_digits", "layout=one_process", "modules.language.lora.rank=4", "optim.lr=1e-2", "preference.beta=0.2"),
    "ipo": ("gpt_tiny", "optim.lr=1e-3"),
    "orpo": ("gpt_tiny",),
    "kto": ("gpt_tiny", "optim.lr=1e-3"),
    "reward": ("gpt_tiny",),
}
"""Task -> config and changes."""
ON_TWO = ("dpo", "kto", "reward")
"""Also evaluated on two replicas."""
FORMS = {"vlm_digits": "digits", "gpt_tiny": "prose"}
SIZES = ("train.iters=4", "train.global_batch_size=8", "train.micro_batch_size=4", "train.eval_samples=12")


def runs(folder: Path, digits: Path) -> dict:
    """The config of each run, and of a student."""
    shards = {"digits": digits, "prose": make_demo(folder / "prose", "text")}
    pairs = {name: write_pairs(min((demo / "train").glob("*.tar")), folder / name, 24) for name, demo in shards.items()}
    cfgs = {}
    for task, (name, *changes) in RUNS.items():
        samples = pairs[FORMS[name]]["labels" if task == "kto" else "pairs"]
        places = (f"data.validation_shards={samples}/train", f"data.cache_dir={folder / task}/cache")
        cfgs[task] = config(name, folder / task, samples, *USUAL_ADAM, *SIZES, *places, f"train.task={task}", *changes)
    for name in ("student", "teacher"):
        models.make_llama(folder / name)
    demo = shards["prose"]
    taught = (f"distill.teacher={folder}/teacher", f"modules.language.pretrained={folder}/student")
    taught += (f"data.validation_shards={demo}/held_out", "train.task=distill", "data.sequence_length=128")
    cfgs["distill"] = load("gpt_tiny", [*overrides(folder / "distill", demo), *SIZES, *taught])
    return cfgs


def evaluated(folder: Path, name: str, options: list[str]) -> tuple[int, str, dict]:
    """On a rank: exit code, output and results.json."""
    out = folder / "_".join([name, *options]).replace("/", "")
    code, said = command(["evaluate", str(folder / name), "--output", str(out), *options])
    results = out / "results.json"
    return code, said, json.loads(results.read_text()) if results.exists() else {}


def alone(folder: Path, digits: Path) -> dict:
    """On a rank: train, and evaluate each run on one process. Returns (last metrics, its evaluation) of each."""
    from mimo_train.logging.sinks.jsonl import read_metrics
    from mimo_train.training.pretrain import pretrain

    measured = {}
    for task, cfg in runs(folder, digits).items():
        assert pretrain(cfg) == 0
        options = ["--metric", "accuracy", "--max-new-tokens", "3"] if task == "dpo" else []
        line = read_metrics(folder / task / "metrics.jsonl")[-1]
        measured[task] = line, evaluated(folder, task, options)
    measured["answers"] = evaluated(folder, "dpo", ["--data", f"{digits}/held_out", "--limit", "4"])
    measured["texts"] = evaluated(folder, "kto", ["--metric", "accuracy"])
    measured["prompts"] = evaluated(folder, "reward", ["--prompts", str(folder / "none")])
    (file,) = (folder / "ipo" / "cache").glob("*.mimo-reference")
    kept = file.rename(file.with_suffix(".kept"))
    measured["missing"] = file.name, *evaluated(folder, "ipo", ["--limit", "4"])
    kept.rename(file)
    return measured


def test_values_are_those_of_training(digits, tmp_path):
    (one,) = run_ranks(alone, 1, tmp_path, digits)
    for task in RUNS:
        line, (code, said, results) = one[task]
        assert code == 0, said
        trained = {name: value for name, value in line.items() if name.startswith("eval/")}
        values = {name: value for name, value in results["metrics"].items() if name != "eval/accuracy"}
        assert values == trained and {"eval/loss", "eval/rewards/chosen"} <= values.keys(), task
        assert ("eval/exact_match" in values) == (task not in ("kto", "reward"))
        assert ("eval/kl" in values) == (task == "kto") and values["eval/samples"] == 12
        assert results["settings"]["task"] == task
        if task in ON_TWO:
            (code, said, results), _ = run_ranks(evaluated, 2, tmp_path, task, ["--processes", "2", "--batch", "2"])
            assert code == 0, said
            assert results["metrics"] == pytest.approx(values, rel=1e-5, abs=1e-5), task
    assert abs(one["dpo"][0]["eval/rewards/margins"]) > 1e-4, "something is learned"

    line, (_, said, results) = one["distill"]
    assert "train.task=distill: measured is the student alone, as train.task=sft" in said
    assert results["metrics"]["eval/loss"] == pytest.approx(line["eval/lm loss"], rel=1e-5)
    assert "eval/exact_match" in results["metrics"] and results["settings"]["task"] == "sft"

    of_set = one["dpo"][1][2]["sets"]["data.validation_shards"]
    assert of_set["answers"] == 12 and 0 < of_set["cut"] <= 12
    assert f"data.validation_shards: {of_set['cut']} of 12 answers were cut" in one["dpo"][1][1]
    code, said, results = one["answers"]
    assert code == 0 and results["settings"]["task"] == "sft", said
    code, said, _ = one["texts"]
    assert code == 1 and "--metric: records of train.task=kto may have undesirable answers" in said
    code, said, _ = one["prompts"]
    assert code == 1 and "is a model with a value head" in said
    name, code, said, _ = one["missing"]
    assert code == 1 and name in said and "log-probabilities are not in" in said
