"""A launched run whose reading threads hang: SIGTERM to the launcher ends it as at any other time."""

import signal
from pathlib import Path

from mimo_train.checkpoint import folders
from mimo_train.config.compose import load
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.runs import curve, train_on_ranks
from tests.e2e.test_exit_paths import events
from tests.e2e.test_train import digits, finish, start, vlm, wait_for  # noqa: F401 (a fixture)

STEPS = 12
OVERRIDES = (f"train.iters={STEPS}", "train.eval_interval=0", "checkpoint.save_interval=0", "data.workers=2")


def test_a_run_whose_reader_hangs_saves_ends_and_goes_on(digits, tmp_path):  # noqa: F811
    own = Path(__file__).parents[1] / "dist" / "slow_callbacks.py"
    (tmp_path / own.name).write_text(own.read_text())
    run_dir = tmp_path / "run"
    command = vlm(digits, run_dir, *OVERRIDES, "train.callbacks=[slow_callbacks:SlowReading]")

    process = start("train_vlm.sh", *command, cwd=tmp_path)
    wait_for((tmp_path / "slow").exists, process)
    process.send_signal(signal.SIGTERM)
    printed = finish(process)
    assert process.returncode == 0, printed
    assert "a signal requested an exit: saved at step" in printed, printed
    (ended,) = events(run_dir, "exit")
    step = int(ended["step"])
    assert ended["reason"] == "signal" and 0 < step < STEPS
    assert folders.newest(run_dir).name == f"step_{step:08d}"

    (tmp_path / "go").touch()
    process = start("train_vlm.sh", *command, cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed
    alone, *overrides = vlm(digits, tmp_path / "alone", *OVERRIDES)
    assert curve(read_metrics(run_dir / "metrics.jsonl")) == curve(train_on_ranks(load(alone, overrides)))


def test_a_run_of_one_process_that_fails_does_not_wait_for_a_reader_that_hangs(digits, tmp_path):  # noqa: F811
    own = Path(__file__).parents[1] / "dist" / "slow_callbacks.py"
    (tmp_path / own.name).write_text(own.read_text())
    one = vlm(digits, tmp_path / "run", *OVERRIDES, "layout=one_process")
    printed = finish(
        process := start("train_vlm.sh", *one, "train.callbacks=[slow_callbacks:FailsWhileReading]", cwd=tmp_path)
    )
    assert process.returncode == 1, printed
    assert "ValueError: an error of a callback" in printed
