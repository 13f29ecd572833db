"""A plan as a user asks for it: the config that it writes is checked, and trained on as many processes as it says."""

import json

import yaml

from mimo_train.cli import main
from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from tests.dist.runs import curve, train_on_ranks


def test_a_written_layout_is_checked_and_trained(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = ["vlm_digits", "run.dir=run", f"data.shards={digits}/train", f"data.validation_shards={digits}/held_out"]
    run += ["data.demo=", "train.iters=2", "train.eval_samples=8", "train.report_samples=0", "run.device=cpu"]
    run += ["train.global_batch_size=8", "modules.language.llm.num_layers=2", "data.workers=0"]
    # So slow a device that the model is large for it, and two ranks are worth their messages.
    asked = ["plan", *run, "--gpus", "2", "--top", "3", "--tflops", "0.001", "--write", "layout.yaml"]
    assert main([*asked, "--json"]) == 0
    proposals = json.loads(capsys.readouterr().out)["proposals"]
    assert len(proposals) == 3 and proposals[0]["ranks"] == 2, proposals
    assert [one["step_seconds"] for one in proposals] == sorted(one["step_seconds"] for one in proposals)
    written = load("layout.yaml")
    assert written == load("vlm_digits", [*run[1:], *proposals[0]["overrides"]])
    assert yaml.safe_load((tmp_path / "layout.yaml").read_text())["train"]["iters"] == 2
    assert resolve(written).layout.world_size == 2
    assert main(["check", "layout.yaml"]) == 0
    assert [step for step, _, _ in curve(train_on_ranks(written))] == [1, 2]
    assert main(asked) == 1
    assert "--write: layout.yaml exists" in capsys.readouterr().err
