"""Steps without any token with a loss: said, never a loss of 0.0, and an error behind `train.max_empty_steps`."""

import math

import pytest
import torch

from mimo_train.commands.train import held_out_line
from mimo_train.training.interval import add_step, take_means
from tests.dist.ranks import RankFailure
from tests.dist.runs import config, train_on_ranks
from tests.dist.training.test_bad_data import spoiled

BATCH = ("train.global_batch_size=8", "train.micro_batch_size=4", "data.shuffle=false", "layout=two_processes")
BATCH = (*BATCH, "data.max_bad_samples=1000", "train.eval_samples=8")


def without_records_before(number: int):
    """Breaks the records of the samples before `number`."""
    return lambda name, content: b"{" if name.endswith(".json") and int(name.split(".")[0]) < number else content


def test_a_run_whose_samples_are_all_bad_ends_with_an_error(digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", without_records_before(10**6))
    with pytest.raises(RankFailure, match=r"train\.max_empty_steps: 2 of 2 steps .*, 1 allowed; 16 bad samples so far"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, *BATCH, "train.iters=9", "train.max_empty_steps=1"))


def test_an_empty_step_has_no_loss_and_no_part_in_a_mean(digits, tmp_path):
    """The records of the first step are broken, and all held-out ones."""
    demo = spoiled(digits, tmp_path / "demo", without_records_before(8))
    broken = spoiled(digits, tmp_path / "broken", without_records_before(10**6))
    allowed = (*BATCH, "train.iters=2", "train.max_empty_steps=1", f"data.validation_shards={broken}/train")
    first, second, evaluation = _lines(train_on_ranks(config("vlm_digits", tmp_path / "one", demo, *allowed)))
    assert not _is_number(first["lm loss"]) and second["lm loss"] > 0.1
    assert [first["empty_steps"], second["empty_steps"]] == [1, 1]
    assert not _is_number(evaluation["eval/loss"]) and evaluation["eval/samples"] == 0
    assert held_out_line(evaluation).startswith("held-out: no sample has a token with loss"), "no number"


def _lines(lines: list[dict]) -> tuple[dict, dict, dict]:
    steps = [line for line in lines if "lm loss" in line]
    return steps[0], steps[1], next(line for line in lines if "eval/samples" in line)


def _is_number(value) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def test_the_mean_of_an_interval_is_over_the_steps_with_tokens():
    totals: dict = {}
    for loss, empty in ((0.0, 1.0), (3.0, 0.0), (5.0, 0.0)):
        add_step(totals, {"lm loss": torch.tensor(loss)}, 0, torch.tensor(empty))
    assert float(take_means(totals)["lm loss"]) == 4.0
    add_step(totals, {"lm loss": torch.tensor(0.0)}, 0, torch.tensor(1.0))
    assert math.isnan(take_means(totals)["lm loss"])
    add_step(totals, {"lm loss": torch.tensor(7.0)}, 0, torch.tensor(0.0))
    assert float(take_means(totals)["lm loss"]) == 7.0


def test_a_loss_that_is_no_token_s_counts_in_every_step():
    totals: dict = {}
    for empty in (1.0, 0.0, 0.0, 0.0):
        losses = {"lm loss": torch.tensor(2.0 - 2 * empty), "z_loss": torch.tensor(1.0)}
        add_step(totals, losses, 0, torch.tensor(empty))
    assert {name: float(mean) for name, mean in take_means(totals).items()} == {"lm loss": 2.0, "z_loss": 1.0}
