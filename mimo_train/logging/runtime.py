"""Time and throughput of a run, as the log has them."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mimo_train.config.errors import UserError
from mimo_train.config.schema_train import TrainConfig

SECONDS = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}
"""Seconds of each unit of `log.runtime_unit`."""


def report_runtime(
    train_state: Any,
    start_time: float,
    seq_length: int,
    train_iters: int,
    time_unit: str = "seconds",
    *,
    loaded_iteration: int = 0,
    tokens: int | None = None,
) -> dict[str, float]:
    """How long the run has taken and will take, if the rest goes as fast as this job has gone.

    Args:
        train_state: has `step` and `consumed_train_samples`.
        start_time: when this job started, in seconds since the epoch.
        seq_length: tokens of a sample.
        train_iters: steps of the run.
        time_unit: seconds, minutes, hours or days.
        loaded_iteration: step that this job started from; earlier steps took none of its time.
        tokens: of the run so far, where samples have other numbers than `seq_length`.

    Returns:
        `time/remaining_estimate` and `time/total` (of this job, in `time_unit`; the former is NaN before its first
        step), `time/tokens`, `time/samples` and `time/batches` (of the whole run).

    Raises:
        UserError: `time_unit` is none of the four.
    """
    if time_unit not in SECONDS:
        raise UserError(f"log.runtime_unit: must be {', '.join(SECONDS)} or empty, is {time_unit!r}")
    elapsed = (time.time() - start_time) / SECONDS[time_unit]
    steps = train_state.step - loaded_iteration
    return {
        "time/remaining_estimate": elapsed / steps * (train_iters - train_state.step) if steps > 0 else math.nan,
        "time/tokens": train_state.consumed_train_samples * seq_length if tokens is None else tokens,
        "time/samples": train_state.consumed_train_samples,
        "time/batches": train_state.step,
        "time/total": elapsed,
    }


def report_throughput(
    train_config: TrainConfig,
    iteration: int,
    seq_length: int,
    history_wct: Sequence[float],
    window_size: int,
    *,
    history_samples: Sequence[int] | None = None,
    history_tokens: Sequence[int] | None = None,
) -> dict[str, float]:
    """Throughput over the latest steps.

    Args:
        train_config: its `global_batch_size` is the samples of a step.
        iteration: steps that this job has done.
        seq_length: tokens of a sample.
        history_wct: seconds of each step, newest last.
        window_size: steps to average over.
        history_samples: samples of each step, newest last, where they differ (`train.rampup_batch_size`).
        history_tokens: tokens of each step, newest last, where samples have other numbers than `seq_length`.

    Returns:
        `throughput/{batches,samples,tokens}_per_sec`, and `throughput/device/...`, which is per process of the run;
        nothing until `window_size` steps are done, or where they took no time.

    Raises:
        UserError: `window_size` is less than 1.
    """
    if window_size < 1:
        raise UserError(f"log.throughput_window: a window needs at least 1 step, has {window_size}")
    if min(iteration, len(history_wct)) < window_size:
        return {}
    seconds = sum(history_wct[-window_size:])
    if seconds <= 0:
        return {}  # a clock that has not moved says nothing
    samples = train_config.global_batch_size * window_size
    if history_samples is not None:
        samples = sum(history_samples[-window_size:])
    tokens = samples * seq_length
    if history_tokens is not None:
        tokens = sum(history_tokens[-window_size:])
    rates = {"batches": window_size / seconds, "samples": samples / seconds, "tokens": tokens / seconds}
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return {f"throughput/{name}_per_sec": rate for name, rate in rates.items()} | {
        f"throughput/device/{name}_per_sec": rate / devices for name, rate in rates.items()
    }
