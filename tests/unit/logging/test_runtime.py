"""Time, throughput and memory of a run."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.config.schema_train import TrainConfig
from mimo_train.logging import runtime
from mimo_train.logging.runtime import (
    MEMORY_KEYS,
    report_memory,
    report_runtime,
    report_throughput,
    start_memory_history_recording,
)

STATE = SimpleNamespace(step=30, consumed_train_samples=240)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """It is 7200 seconds after 1000."""
    monkeypatch.setattr(runtime.time, "time", lambda: 8200.0)


@pytest.mark.parametrize(
    ("unit", "total", "remaining"),
    [("seconds", 7200, 16800), ("minutes", 120, 280), ("hours", 2, 14 / 3), ("days", 1 / 12, 7 / 36)],
)
def test_runtime_in_every_unit(unit, total, remaining):
    # 30 steps in two hours: the other 70 of 100 take 70 / 30 of that.
    assert report_runtime(STATE, 1000, seq_length=16, train_iters=100, time_unit=unit) == pytest.approx(
        {
            "time/remaining_estimate": remaining,
            "time/tokens": 3840,
            "time/samples": 240,
            "time/batches": 30,
            "time/total": total,
        }
    )


def test_throughput_over_the_window(monkeypatch):
    monkeypatch.setattr(runtime.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(runtime.dist, "get_world_size", lambda: 4)
    # The last 3 steps took 8 seconds; 32 samples of 10 tokens each.
    values = report_throughput(TrainConfig(global_batch_size=32), 5, 10, [100.0, 9.0, 1.0, 2.0, 5.0], 3)
    assert values == pytest.approx(
        {
            "throughput/batches_per_sec": 3 / 8,
            "throughput/samples_per_sec": 12,
            "throughput/tokens_per_sec": 120,
            "throughput/device/batches_per_sec": 3 / 32,
            "throughput/device/samples_per_sec": 3,
            "throughput/device/tokens_per_sec": 30,
        }
    )


STATISTICS = {
    "allocated_bytes.all.current": 1_000_000_000,
    "active_bytes.all.current": 1_100_000_000,
    "inactive_split_bytes.all.current": 0,
    "reserved_bytes.all.current": 2_000_000_000,
    "allocated_bytes.all.peak": 3_000_000_001,
    "active_bytes.all.peak": 3_500_000_000,
    "inactive_split_bytes.all.peak": 250_000_000,
    "reserved_bytes.all.peak": 4_000_000_000,
    "num_alloc_retries": 2,
    "num_ooms": 1,
}


def with_cuda(monkeypatch, statistics=STATISTICS):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: statistics)


def test_every_statistic_of_the_allocator_in_gigabytes(monkeypatch):
    with_cuda(monkeypatch)
    report = report_memory(None)
    assert report == {
        "current_allocated_mem": 1.0,
        "current_active_mem": 1.1,
        "current_inactive_mem": 0.0,
        "current_reserved_mem": 2.0,
        "peak_allocated_mem": 3.000000001,
        "peak_active_mem": 3.5,
        "peak_inactive_mem": 0.25,
        "peak_reserved_mem": 4.0,
        "alloc_retries": 2,
    }
    assert list(report) == list(MEMORY_KEYS.values()) and type(report["alloc_retries"]) is int
    keys = {"num_ooms": "out_of_memory", "reserved_bytes.all.peak": "peak", "not_counted": "missing"}
    assert report_memory(keys) == {"out_of_memory": 1, "peak": 4.0}
    assert report_memory({}) == {}


def test_without_cuda_the_memory_of_the_process():
    block = bytearray(b"1" * 50_000_000)
    report = report_memory(None)
    assert report.keys() == {"current_resident_mem"}
    assert len(block) / 1e9 < report["current_resident_mem"] < 1000
    assert report_memory(MEMORY_KEYS) == {}


def test_history_is_recorded_where_a_snapshot_is_wanted(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    start_memory_history_recording(None)
    start_memory_history_recording(ProfilingConfig(record=["torch"], ranks=[0]))
    start_memory_history_recording(ProfilingConfig(record=["memory_history"], ranks=[1, 2]))
    assert calls == []
    start_memory_history_recording(ProfilingConfig(record=["memory_history"], ranks=[1, 0]))
    assert calls == [{"max_entries": runtime.HISTORY_LENGTH}]
