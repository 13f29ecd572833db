"""Set-up that fails, where the data ends a run, and restarts inside the processes."""

from types import SimpleNamespace

import pytest

from mimo_train.config import schema_run
from mimo_train.config.errors import ConfigError
from mimo_train.layout.run import config_faults, resolve, with_iters
from mimo_train.logging.progress import FINISHED
from mimo_train.training.data_setup import data_end, nothing_left
from mimo_train.training.log import is_logging_step
from mimo_train.training.saving import exit_reason
from mimo_train.training.shutdown import AgreedVotes
from mimo_train.training.step.state import GlobalState, TrainState
from tests.unit.configs import load


def stopping(*overrides):
    return resolve(load("vlm_digits", "train.global_batch_size=8", "data.exhausted=stop", *overrides))


def of(samples):
    source = SimpleNamespace(name="a")
    order = SimpleNamespace(exhausted=lambda: (0, samples), sizes=[samples])
    return SimpleNamespace(order=order, sources=[source])


def test_a_run_ends_with_its_data_and_its_config_keeps_its_length():
    run, progress = stopping("train.iters=50", "train.log_interval=7"), TrainState()
    ends = data_end(run, of(30), progress)
    assert "the 30 samples of a last until step 3 of train.iters 50" in str(ends)
    state = GlobalState(run, progress, data_ends=ends.step)
    assert state.cfg.train.iters == 50 and state.last_step == 3, "schedules of a replay are made by the config"
    progress.step = 2
    assert exit_reason(state, AgreedVotes()) is None and not is_logging_step(state.cfg, 2, state.last_step)
    progress.step = 3
    assert exit_reason(state, AgreedVotes()) == FINISHED and is_logging_step(state.cfg, 3, state.last_step)
    assert data_end(run, of(400), TrainState()) is None and GlobalState(run).last_step == 50


def test_a_new_run_without_a_step_is_a_fault_and_one_that_goes_on_is_told_which_key_decided():
    run = stopping("train.iters=50")
    with pytest.raises(ConfigError, match=r"data\.exhausted: is stop, and the 7 samples of a do not last .* 8 samples"):
        data_end(run, of(7), TrainState())
    done = TrainState(step=3, consumed_train_samples=24)
    said = nothing_left(GlobalState(run, done, data_ends=data_end(run, of(30), done).step))
    assert "step 3 is done" in said and "data.exhausted=repeat" in said and "iters" not in said
    epochs = with_iters(stopping("train.iters=0", "train.epochs=2"), 60)
    assert "step 3 of the 60 steps of train.epochs 2 is done" in nothing_left(GlobalState(epochs, done))
    assert "until step 3 of the 60 steps of train.epochs 2" in str(data_end(epochs, of(30), TrainState()))
    assert "step 3 of train.iters 50 is done" in nothing_left(GlobalState(run, done))


def test_without_the_package_it_is_a_fault(monkeypatch):
    monkeypatch.setattr(schema_run, "is_installed", lambda name: False)
    (fault,) = config_faults(load("vlm_digits", "run.inprocess_restarts=2"))
    assert fault.key == "run.inprocess_restarts" and "pip install 'mimo-train[resiliency]'" in fault.message
    assert not config_faults(load("vlm_digits"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("run.inprocess_restarts=-1",), "at least 0"),
        (("run.timeout_minutes=0.25", "run.inprocess_restarts=2"), "above 0.25"),
        (("checkpoint.resume=never", "run.inprocess_restarts=2"), "must be auto"),
    ],
)
def test_impossible_values_are_faults(overrides, words, monkeypatch):
    monkeypatch.setattr(schema_run, "is_installed", lambda name: True)
    (fault,) = config_faults(load("vlm_digits", *overrides))
    assert overrides[0].startswith(f"{fault.key}=") and words in fault.message
