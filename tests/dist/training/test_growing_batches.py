"""Steps of other sizes: batches that grow, and steps that are passed over, at any layout and across a resume."""

from pathlib import Path

import pytest

from mimo_train.layout.batch import Batch
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks

RAMP = ("train.global_batch_size=16", "train.micro_batch_size=2", "train.rampup_batch_size=[4, 4, 40]")


def run(digits: Path, run_dir: Path, *overrides: str) -> list[dict]:
    """Lines of the log of 10 steps."""
    return train_on_ranks(config("vlm_digits", run_dir, digits, "train.iters=10", *overrides))


@pytest.fixture(scope="module")
def one_process(digits, tmp_path_factory) -> list[dict]:
    """Log of the growing run on one process."""
    return run(digits, tmp_path_factory.mktemp("ramp"), "layout=one_process", *RAMP)


def test_consumed_samples_follow_the_ramp(one_process):
    sizes = Batch(16, 2, 2, first=4, increment=4, ramp_samples=40)
    assert [line["consumed_samples"] for line in one_process] == [sizes.samples_of(step) for step in range(1, 11)]
    assert one_process[-1]["consumed_samples"] < 10 * 16


@pytest.mark.parametrize("layout", ["two_processes", "images_dp2_language_dp2"])
def test_a_growing_batch_gives_the_numbers_of_one_process(layout, one_process, digits, tmp_path):
    other = run(digits, tmp_path, f"layout={layout}", *RAMP)
    assert max(largest_difference(curve(one_process), curve(other))) < TOLERANCE


def test_a_growing_batch_is_the_batch_of_its_size(one_process, digits, tmp_path):
    """The first steps are those of a run of 4 samples a step."""
    small = run(digits, tmp_path, "layout=one_process", "train.global_batch_size=4", "train.micro_batch_size=2")
    first = [
        Batch(16, 2, 2, first=4, increment=4, ramp_samples=40).size_at(line["consumed_samples"]) for line in one_process
    ]
    same = 1 + first.index(8)
    assert same >= 3 and curve(one_process)[:same] == curve(small)[:same]


def test_a_resumed_ramp_goes_on_where_it_was_also_packed(one_process, digits, tmp_path):
    packed = ("layout=two_processes", *RAMP, "data.pack=true", "data.pack_length=160")
    train_on_ranks(config("vlm_digits", tmp_path, digits, "train.iters=10", *packed, "train.exit_interval=5"))
    lines = run(digits, tmp_path, *packed)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert max(largest_difference(curve(one_process), curve(lines))) < TOLERANCE


def test_steps_that_are_passed_over_cost_their_samples_and_nothing_else(digits, tmp_path):
    lines = run(digits, tmp_path / "skip", "layout=two_processes", "train.skip_iters=[1, 4, 5]")
    assert [line["step"] for line in lines] == [2, 3, 6, 7, 8, 9, 10]
    assert [line["consumed_samples"] for line in lines] == [16 * step for step in (2, 3, 6, 7, 8, 9, 10)]
    # Nothing was learned at step 1: the loss of step 2 is that of the initial weights, and its rate is the first.
    assert lines[0]["learning_rate/language"] == 0.0
    again = run(digits, tmp_path / "one", "layout=one_process", "train.skip_iters=[1, 4, 5]")
    assert max(largest_difference(curve(lines), curve(again))) < TOLERANCE


def test_the_log_is_written_when_it_is_due_also_after_a_step_that_is_skipped(digits, tmp_path):
    skipping = ("layout=two_processes", "train.skip_iters=[4, 9, 10]", "train.log_interval=4")
    lines = run(digits, tmp_path / "four", *skipping)
    each = run(digits, tmp_path / "one", "layout=two_processes", "train.skip_iters=[4, 9, 10]")
    assert [line["step"] for line in lines] == [4, 8], "steps 9 and 10 leave nothing to write"
    losses = {line["step"]: line["lm loss"] for line in each}
    assert lines[0]["lm loss"] == pytest.approx(sum(losses[step] for step in (1, 2, 3)) / 3)
    assert lines[1]["lm loss"] == pytest.approx(sum(losses[step] for step in (5, 6, 7, 8)) / 4)
    assert lines[0]["grad_norm"] == each[2]["grad_norm"]
