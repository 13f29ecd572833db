import torch

from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.logging import runtime
from mimo_train.logging.runtime import MEMORY_KEYS, report_memory, start_memory_history_recording

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


def test_keys_of_ones_own(monkeypatch):
    with_cuda(monkeypatch)
    keys = {"num_ooms": "out_of_memory", "reserved_bytes.all.peak": "peak", "not_counted": "missing"}
    assert report_memory(keys) == {"out_of_memory": 1, "peak": 4.0}
    assert report_memory({}) == {}


def test_the_keys_are_those_that_torch_counts():
    documented = torch.cuda.memory_stats.__doc__
    for key in MEMORY_KEYS:
        family, *parts = key.split(".")
        assert f'"{family}' in documented, key
        assert not parts or parts in (["all", "current"], ["all", "peak"])


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
    start_memory_history_recording(ProfilingConfig(memory_history=False, ranks=[0]))
    start_memory_history_recording(ProfilingConfig(memory_history=True, ranks=[1, 2]))
    assert calls == []
    start_memory_history_recording(ProfilingConfig(memory_history=True, ranks=[1, 0]))
    assert calls == [{"max_entries": runtime.HISTORY_LENGTH}]
