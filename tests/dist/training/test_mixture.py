"""Two sources mixed on vlm_digits: losses at any layout, resumed in another with other weights, held-out sets."""

import shutil

import pytest

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.runs import TOLERANCE, config, train_on_ranks


def mixed(tmp_path, demo, *overrides):
    sources = [f"{{name: {name}, shards: {demo}/train/{at}, weight: {weight}}}" for name, at, weight in SOURCES]
    return config(
        "vlm_digits",
        tmp_path,
        demo,
        "data.shards=",
        f"data.mix=[{', '.join(sources)}]",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        "train.log_interval=2",
        f"data.validation={{more: {{shards: {demo}/held_out}}}}",
        f"data.validation_shards={demo}/held_out",
        "train.eval_samples=4",
        *overrides,
    )


SOURCES = (("chats", "*1.tar", 3), ("talks", "*0.tar", 1))
ONE, TWO = "layout=one_process", "layout=images_dp1_language_dp2"


def losses(lines):
    return {
        (line["step"], key): value
        for line in lines
        for key, value in line.items()
        if key in ("lm loss", "loss/chats", "loss/talks", "samples/chats", "samples/talks", "epochs/talks")
    }


def test_sources_have_their_losses_at_any_layout_and_new_weights_continue(digits, tmp_path):
    whole = train_on_ranks(mixed(tmp_path / "whole", digits, ONE, "train.iters=4", "checkpoint.save_interval=2"))
    lines = [line for line in whole if "lm loss" in line]
    assert [line["samples/chats"] for line in lines] == [12, 24] and lines[1]["samples/talks"] == 8
    assert lines[1]["epochs/talks"] == 8 / 240 and all("loss/chats" in line for line in lines)
    held_out = whole[-1]
    assert held_out["eval/more/loss"] == held_out["eval/loss"] and held_out["eval/more/samples"] == 4

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_00000004")
    other = mixed(tmp_path / "parts", digits, TWO, "train.iters=4")
    rest = losses(train_on_ranks(other))
    for key, value in losses(whole).items():
        assert rest[key] == pytest.approx(value, rel=TOLERANCE), key

    # Other weights hold from there on.
    train_on_ranks(mixed(tmp_path / "parts", digits, "data.mix[0].weight=1", "train.iters=6", TWO))
    last = [line for line in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "lm loss" in line][-1]
    assert last["step"] == 6 and last["samples/chats"] == 24 + 8 and last["samples/talks"] == 8 + 8


def test_length_in_epochs_ends_a_run_and_exhausted_sources_too(digits, tmp_path):
    held = ("data.validation_shards=", "data.validation_fraction=0.9", "train.log_interval=1")
    lines = train_on_ranks(mixed(tmp_path / "epochs", digits, ONE, *held, "train.iters=0", "train.epochs=0.25"))
    last = [line for line in lines if "lm loss" in line][-1]
    assert "eval/chats/loss" in lines[-1] and "eval/more/loss" in lines[-1] and "eval/loss" not in lines[-1]
    drawn = last["samples/chats"] + last["samples/talks"]
    sizes = sum(last[f"samples/{name}"] / last[f"epochs/{name}"] for name in ("chats", "talks"))
    assert last["consumed_samples"] == drawn and 0.25 * sizes <= drawn < 0.25 * sizes + 8
    lines = train_on_ranks(mixed(tmp_path / "stop", digits, ONE, *held, "train.iters=50", "data.exhausted=stop"))
    ended = [line for line in lines if "lm loss" in line][-1]
    assert ended["step"] < 50 and ended["epochs/chats"] <= 1 < ended["epochs/chats"] * 1.5
    assert lines[-1]["step"] == ended["step"] and "eval/talks/loss" in lines[-1]
