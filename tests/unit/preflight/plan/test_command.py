"""The options of the command, its output, and its errors."""

import json
import re

import pytest

from mimo_train.cli import main
from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from mimo_train.preflight.plan.command import device_of

CONFIG, SMALL = ("plan", "vlm_digits"), ("--gpus", "4", "--top", "2")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_values_take_the_place_of_those_of_the_table():
    a100, changed = device_of("a100"), device_of("a100", memory=48.0, tflops=100.0, bandwidth=32.0, network=5.0)
    assert (a100.name, changed.name) == ("a100", "a100, changed") and changed.traffic == a100.traffic
    assert (changed.memory, changed.half, changed.single) == (48e9, 100e12, 100e12)
    assert (changed.inside, changed.across) == (32e9, 5e9)


def test_every_proposal_says_what_limits_it_and_how_it_is_chosen(capsys):
    code, said, _ = run(capsys, *CONFIG, "train.global_batch_size=32", *SMALL, "--tflops", "0.01")
    assert code == 0
    assert "4 x h100, changed (80 GB, 0.01 TFLOP/s" in said and "1. images" in said and "2. images" in said
    for words in ("a step: ", "samples/s and ", "tokens/s for each GPU", "bubble ", "idle: images ", "memory ",
                  "limited by ", "modules.language.layout.", "note: assumed, not measured"):  # fmt: skip
        assert said.count(words) >= 1, words


@pytest.mark.parametrize(("balancing", "times"), [("aux_loss", 1), ("seq_aux_loss", 0)])
def test_plans_say_where_numbers_follow_from_the_layout(capsys, balancing, times):
    experts = ("num_experts=4", "experts_per_token=2", "bias=false", f"router_balancing={balancing}")
    code, said, _ = run(capsys, *CONFIG, *SMALL, *(f"modules.language.llm.{one}" for one in experts))
    assert code == 0 and said.count(f"router_balancing={balancing} balances experts over a microbatch") == times


def test_data_say_the_same(capsys):
    code, said, _ = run(capsys, *CONFIG, *SMALL, "--json", "--gpu", "l40s", "--margin", "0")
    found = json.loads(said)
    assert code == 0 and found["gpus"] == 4 and found["device"] == "l40s" and len(found["proposals"]) == 2
    for one in found["proposals"]:
        samples = 16 / one["step_seconds"] / 4
        assert one["samples_per_second_per_gpu"] == pytest.approx(samples)
        assert one["tokens_per_second_per_gpu"] == pytest.approx(72 * samples)
        assert set(one["idle"]) == {"images", "language"} and sum(one["shares"].values()) == pytest.approx(1)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("speed", "ranks"), [("0.00001", 4), ("1000", 1)])
def test_what_is_written_is_said(capsys, monkeypatch, tmp_path, as_json, speed, ranks):
    monkeypatch.chdir(tmp_path)
    extra = ["--json"] if as_json else []
    code, printed, said = run(capsys, *CONFIG, *SMALL, "--tflops", speed, "--write", "my layout.yaml", *extra)
    used = "all 4 GPUs" if ranks == 4 else f"{ranks} of the 4 GPUs: the others would stand idle"
    line = f"wrote my layout.yaml: proposal 1, on {used}; next: mimo-train check 'my layout.yaml'\n"
    assert code == 0 and (said if as_json else printed).endswith(line)
    if as_json:
        assert json.loads(printed)["proposals"][0]["ranks"] == ranks
    assert resolve(load("my layout.yaml")).layout.world_size == ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "0.0001"), "--gpus: no layout fits on 4 x h100, changed"),
        (("--write", "none/layout.yaml"), "--write: the folder none of layout.yaml does not exist"),
        (("optim.lr=-1",), "optim.lr"),
        (("train.global_batch_size=0",), "train.global_batch_size"),
        (("modules.language.llm.num_attention_heads=5",), "modules.language.llm"),
    ],
)
def test_what_cannot_be_planned_is_a_fault(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    overrides = [one for one in arguments if "=" in one]
    code, printed, said = run(capsys, *CONFIG, *overrides, *SMALL, *(one for one in arguments if one not in overrides))
    assert code == 1 and words in said and not printed, "nothing is planned before"


@pytest.mark.parametrize("arguments", [("--gpus", "0"), ("--gpu", "h900"), ("--margin", "1"), ("--media", "-1")])
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main((*CONFIG, *SMALL, *arguments))
    assert ended.value.code == 2


def test_what_does_not_fit_says_what_does(capsys):
    """A full run of 7B on one GPU: it fits with adapters, or on more GPUs."""
    recipe = ("plan", "recipes/llava_1_5_finetune", "--without-data")
    code, _, said = run(capsys, *recipe, "--gpus", "1")
    assert code == 1 and "With LoRA on the language model (modules.language.lora.rank=16) it fits, with " in said
    more = re.search(r"On (\d+) x h100 it fits as it is", said)
    for fitting in (("--gpus", "1", "modules.language.lora.rank=16"), ("--gpus", more[1])):
        assert run(capsys, *recipe, *fitting)[0] == 0
    code, _, said = run(capsys, *recipe, "--gpus", "1", "--memory", "0.001")
    assert code == 1 and said.rstrip().endswith("kept free). Use more or larger GPUs.")
