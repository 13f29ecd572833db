"""Time, throughput and memory of a run for the log."""

import math
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from mimo_train.config.errors import UserError
from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.config.schema_train import TrainConfig
from mimo_train.parallel import device

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
    """Return the elapsed time, and the remaining time at this job's speed so far.

    Args:
        train_state: has `step` and `consumed_train_samples`.
        start_time: Unix time when this job started.
        seq_length: tokens of a sample.
        train_iters: steps of the run.
        time_unit: seconds, minutes, hours or days.
        loaded_iteration: step that this job resumed from.
        tokens: tokens of the run so far, if samples differ from `seq_length`.

    Returns:
        `time/remaining_estimate` (NaN before the first step) and `time/total`, both of this job in `time_unit`;
        `time/tokens`, `time/samples` and `time/batches` of the whole run.

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
    """Return the throughput over the latest steps.

    Args:
        train_config: provides `global_batch_size`.
        iteration: steps that this job has done.
        seq_length: tokens of a sample.
        history_wct: seconds of each step, newest last.
        window_size: steps to average over.
        history_samples: samples of each step, newest last, if they differ (`train.rampup_batch_size`).
        history_tokens: tokens of each step, newest last, if samples differ from `seq_length`.

    Returns:
        `throughput/{batches,samples,tokens}_per_sec`, and `throughput/device/...` per process; empty until
        `window_size` steps are done or if they took no time.
    """
    if min(iteration, len(history_wct)) < window_size:
        return {}
    seconds = sum(history_wct[-window_size:])
    if seconds <= 0:
        return {}  # the clock has not moved
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


MEMORY_KEYS: dict[str, str] = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}
"""Statistics of `torch.cuda.memory_stats()`, and their names in the log."""

RESIDENT_KEY = "current_resident_mem"
"""Logged instead without CUDA: resident main memory of the process."""

HISTORY_LENGTH = 100_000
"""Newest allocations and frees that a recording keeps, to bound its main memory."""


def report_memory(memory_keys: dict[str, str] | None) -> dict[str, float]:
    """Return memory statistics of this rank, without communication or device copies.

    Args:
        memory_keys: statistics of `torch.cuda.memory_stats()` and their log names. None: `MEMORY_KEYS`, or the resident
            memory as `current_resident_mem` if the process has not used CUDA.

    Returns:
        Sizes in gigabytes (10^9 bytes), counts as whole numbers; unavailable statistics are left out.
    """
    statistics = device.memory_statistics()
    if statistics is None:
        return {RESIDENT_KEY: psutil.Process().memory_info().rss / 1e9} if memory_keys is None else {}
    return {
        name: statistics[key] / 1e9 if "bytes" in key else statistics[key]
        for key, name in (MEMORY_KEYS if memory_keys is None else memory_keys).items()
        if key in statistics
    }


def largest_over(report: dict[str, int | float], group: dist.ProcessGroup | None) -> dict[str, int | float]:
    """Return each value's maximum over a group. Collective: one reduction and one copy to the host.

    The first pipeline stage holds the activations of most microbatches, but the last stage's rank writes the log.

    Args:
        report: this rank's values; all ranks have the same keys.

    Returns:
        A new dict on every rank, counts still whole numbers; `report` itself if there is nothing to reduce: no process
        group, one rank, or an empty report.
    """
    if not report or group is None or not dist.is_initialized() or group.size() == 1:
        return report
    values = torch.tensor(list(report.values()), dtype=torch.float64, device=device.current())
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return {name: type(value)(largest) for (name, value), largest in zip(report.items(), values.tolist(), strict=True)}


def start_memory_history_recording(profiling: ProfilingConfig | None) -> None:
    """Record the CUDA allocator's actions with Python stacks, on `profiling.ranks` if `profiling.record` has
    `memory_history`.

    Call it before building the model: a snapshot shows only what was allocated while recording.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if profiling is not None and "memory_history" in profiling.record and rank in profiling.ranks:
        device.record_memory_history(HISTORY_LENGTH)
