"""The metrics that `checkpoint.keep_best` and `train.stop_early` watch: their values on all ranks, and the decision to
stop. Everything is a function of `TrainState.scores`, so that a resumed run decides as an uninterrupted one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_selection import StopEarlyConfig, WatchConfig, set_of
from mimo_train.training.step.state import GlobalState


def watched(cfg: ConfigContainer) -> dict[str, WatchConfig]:
    """Return the sections that watch a metric, by config key."""
    sections = {"checkpoint.keep_best": cfg.checkpoint.keep_best, "train.stop_early": cfg.train.stop_early}
    return {key: section for key, section in sections.items() if section.metric}


def missing(cfg: ConfigContainer, values: Mapping[str, float], evaluated: Sequence[str], sets: Sequence[str]) -> str:
    """Return the error for a watched metric that an evaluation should have given; empty if there is none.

    Args:
        values: values of the evaluation.
        evaluated: prefixes of its sets.
        sets: prefixes of all sets that are evaluated during training.
    """
    for key, section in watched(cfg).items():
        at = set_of(section.metric, dict.fromkeys(sets, 0))
        if section.metric not in values and (at is None or at in evaluated):
            given = ", ".join(name for name in values if name.startswith(at or "eval/"))
            return f"{key}.metric: no evaluation gives {section.metric}. Set one of {given}"
    return ""


def note_scores(state: GlobalState, values: Mapping[str, float], evaluated: Sequence[str], sets: Sequence[str]) -> None:
    """Add the watched values of the current step to `TrainState.scores`, on every rank. Collective.

    Args:
        values: values of the evaluation, read on the logging rank.
        evaluated, sets: see `missing`.

    Raises:
        UserError: no evaluation gives a watched metric; on every rank.
    """
    metrics = {section.metric for section in watched(state.cfg).values()}
    if not metrics:
        return
    box: list[Any] = [None]
    if state.is_logging_rank:
        fault = missing(state.cfg, values, evaluated, sets)
        box = [(fault, {metric: float(values[metric]) for metric in sorted(metrics) if metric in values})]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=state.layout.logging_rank)
    fault, scores = box[0]
    if fault:
        raise UserError(fault)
    step, before = state.train_state.step, state.train_state.scores
    after = {metric: list(before.get(metric, [])) for metric in sorted(metrics)}
    for metric, value in scores.items():  # of a repeated evaluation, the last counts
        after[metric] = [entry for entry in after[metric] if entry[0] < step] + [[step, value]]
    state.train_state.scores = after


def stop_reason(watch: StopEarlyConfig, scores: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return why the run should stop after its last evaluation; empty if it should continue."""
    best: tuple[float, float] | None = None
    since = 0
    for step, value in scores.get(watch.metric, ()) if watch.metric else ():
        if math.isfinite(value) and (best is None or watch.is_better(value, best[1], watch.min_delta)):
            best, since = (step, value), 0
        else:
            since += 1
    if since < watch.patience:
        return ""
    reached = "it was never finite" if best is None else f"best {best[1]:.6g} at step {best[0]:.0f}"
    by = f" by more than {watch.min_delta:g}" if watch.min_delta else ""
    return f"{watch.metric} has not improved{by} for {since} evaluations ({reached})"
