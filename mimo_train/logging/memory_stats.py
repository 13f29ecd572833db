"""Memory that a run has used: statistics of the CUDA allocator, or of the process where there is no CUDA."""

import psutil
import torch
import torch.distributed as dist

from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.parallel import device

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
"""Statistics of `torch.cuda.memory_stats()`, and the names they are logged under."""

RESIDENT_KEY = "current_resident_mem"
"""What is reported instead on a run without CUDA: main memory that the process holds."""

HISTORY_LENGTH = 100_000
"""Allocations and frees that a recording keeps, the newest, so that the main memory that it takes is bounded."""


def report_memory(memory_keys: dict[str, str] | None) -> dict[str, float]:
    """Memory statistics of this rank. No message, no copy from the device.

    Args:
        memory_keys: names of statistics of `torch.cuda.memory_stats()` to the names they get; None: `MEMORY_KEYS`, and
            where the process has not used CUDA, its resident memory as `current_resident_mem`.

    Returns:
        Sizes in gigabytes (10^9 bytes), counts as whole numbers; what this torch or device does not count is left out.
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
    """The largest of each value over the ranks of a group. Collective: one maximum, and one copy to the host.

    The first stage of a pipeline holds the activations of most microbatches, and the rank that writes the log is on the
    last one.

    Args:
        report: of this rank; every rank of the group has the same keys.

    Returns:
        A new dict on every rank, counts still whole numbers; the report itself where there is nothing to reduce: no
        process group, one rank, or an empty report.
    """
    if not report or group is None or not dist.is_initialized() or group.size() == 1:
        return report
    values = torch.tensor(list(report.values()), dtype=torch.float64, device=device.current())
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return {name: type(own)(largest) for (name, own), largest in zip(report.items(), values.tolist(), strict=True)}


def start_memory_history_recording(profiling: ProfilingConfig | None) -> None:
    """Record what the CUDA allocator does from now on, with the lines of Python that ask for memory, on the ranks of
    `profiling.ranks` if `profiling.memory_history` is set.

    To be called before the model is built: a snapshot shows only what was allocated while it was recording.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if profiling is not None and profiling.memory_history and rank in profiling.ranks:
        device.record_memory_history(HISTORY_LENGTH)
