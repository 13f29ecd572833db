"""When a run ends early, and the faults of the keys that watch a metric."""

import math
from types import SimpleNamespace

import pytest

from mimo_train.config.errors import ConfigError
from mimo_train.config.schema_selection import StopEarlyConfig
from mimo_train.training import watching
from mimo_train.training.watching import missing, note_scores, stop_reason
from tests.unit.configs import load


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "stops"),
    [
        ("min", 0.0, [3, 2, 1], ""),
        ("min", 0.0, [1, 1, 1], "has not improved for 2 evaluations (best 1 at step 10)"),
        ("min", 0.0, [1, 2, 0.5, 2], ""),
        ("max", 0.0, [0.5, 0.4, 0.3], "has not improved for 2 evaluations (best 0.5 at step 10)"),
        ("min", 0.2, [1, 0.9, 0.85], "has not improved by more than 0.2 for 2 evaluations (best 1 at step 10)"),
        ("min", 0.2, [1, 0.9, 0.7, 0.6], ""),  # small improvements add up
        ("min", 0.0, [math.nan, math.nan], "has not improved for 2 evaluations (it was never finite)"),
        ("min", 0.0, [math.nan, 1, math.nan], ""),
    ],
)
def test_a_run_stops_after_evaluations_without_improvement(mode, min_delta, values, stops):
    watch = StopEarlyConfig("eval/loss", mode, patience=2, min_delta=min_delta)
    scores = {"eval/loss": [[10 * number, value] for number, value in enumerate(values, start=1)]}
    assert stop_reason(watch, scores) == (stops and f"eval/loss {stops}")
    assert stop_reason(StopEarlyConfig(), scores) == ""


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ("checkpoint.keep_best.metric=eval/loss", "checkpoint.keep_best.mode: is empty. Set min if smaller values"),
        ("checkpoint.keep_best={metric: lm loss, mode: min}", "checkpoint.keep_best.metric: lm loss is of no set"),
        ("train.stop_early={metric: test/loss, mode: min}", "train.stop_early.metric: test/loss is of no set"),
        ("checkpoint.keep_best={metric: eval/loss, mode: min, count: 0}", "checkpoint.keep_best.count: "),
        (
            "train.stop_early={metric: eval/loss, mode: min}; train.eval_interval=0",
            "train.stop_early.metric: eval/loss is only evaluated after the last step. Set train.eval_interval",
        ),
        ("data.test={a: {shards: x, interval: 5}}", "data.test.a.interval: is 5, but test sets are evaluated once"),
        ("data.validation={a: {shards: x, interval: 5}}; train.stop_early={metric: eval/a/loss, mode: min}", ""),
    ],
)
def test_what_is_watched_must_be_evaluated(overrides, fault):
    try:
        faults = [str(each) for each in load("vlm_digits", *overrides.split("; ")).faults()]
    except ConfigError as error:
        faults = [str(each) for each in error.faults]
    assert (not faults) if not fault else any(text.startswith(fault) for text in faults), faults


def test_a_metric_of_a_set_that_was_not_evaluated_is_not_missing():
    watch = "checkpoint.keep_best={metric: eval/charts/anls, mode: max}"
    cfg = load("vlm_digits", watch, "data.validation={charts: {shards: x}}")
    sets = ["eval/", "eval/charts/"]
    assert missing(cfg, {"eval/loss": 1.0}, ["eval/"], sets) == ""
    fault = missing(cfg, {"eval/loss": 1.0, "eval/charts/loss": 2.0}, sets, sets)
    assert fault == "checkpoint.keep_best.metric: no evaluation gives eval/charts/anls. Set one of eval/charts/loss"


def test_sets_of_one_step_may_be_evaluated_apart(monkeypatch):
    """As those that an early end evaluates after the set that decides it."""
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 1)
    watch = "checkpoint.keep_best={metric: eval/a/loss, mode: min}", "train.stop_early={metric: eval/loss, mode: min}"
    cfg, sets = load("vlm_digits", *watch, "data.validation={a: {shards: x, interval: 5}}"), ["eval/", "eval/a/"]
    run = SimpleNamespace(step=8, scores={"eval/loss": [[4, 1.0], [8, 9.0]]})
    state = SimpleNamespace(cfg=cfg, is_logging_rank=True, train_state=run)
    note_scores(state, {"eval/loss": 2.0}, ["eval/"], sets)
    note_scores(state, {"eval/a/loss": 3.0}, ["eval/a/"], sets)
    assert run.scores == {"eval/a/loss": [[8, 3.0]], "eval/loss": [[4, 1.0], [8, 2.0]]}
