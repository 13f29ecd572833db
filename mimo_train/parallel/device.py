"""The device of a process: CUDA, or the CPU with a stand-in for CUDA. The only file that distinguishes the two.

A CUDA run is left untouched; on a CPU run, `install("cpu")` installs the stand-in, once per process.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from mimo_train.config.fault import UserError
from mimo_train.parallel.cuda_stand_in import CPU, StandIn

_stand_ins: list[StandIn] = []
"""The process's stand-in; it changes other modules for the whole process, so there is one at most."""


def resolve(requested: str, processes: int = 1) -> str:
    """`auto`, `cuda` or `cpu` -> the kind of device of this run; auto is CUDA where every process gets a device.

    Args:
        requested: `run.device`.
        processes: processes of the run on this machine; NCCL wants a device for each.

    Raises:
        UserError: `run.device` is unknown, or asks for CUDA where there are not enough devices.
    """
    if requested not in ("auto", "cuda", "cpu"):
        raise UserError(f"run.device: must be auto, cuda or cpu, is {requested!r}")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cuda" and not available:
        raise UserError("run.device: is cuda, but torch sees no CUDA device here: use cpu or auto")
    if requested == "cuda" and available < processes:
        raise UserError(
            f"run.device: is cuda, but {processes} processes on this machine have {available} CUDA devices: use a "
            "layout of fewer ranks (layout=one_process), more nodes, or cpu"
        )
    return "cuda" if available >= processes and requested != "cpu" else "cpu"


def install(kind: str, local_rank: int = 0) -> torch.device:
    """Prepare this process for `kind` (`cuda` or `cpu`) and return its device.

    For `cpu` the stand-in is installed, once per process; for `cuda` the device of `local_rank` is selected.
    """
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if not _stand_ins:
        _stand_ins.append(StandIn())
    return CPU


def backend(kind: str) -> str:
    """Backends of torch.distributed: tensors of either device can be communicated."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def init_process_group(
    kind: str, timeout_minutes: float, device: torch.device, store: torch.distributed.Store | None = None
) -> None:
    """Join the processes of the run by torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or over
    `store`."""
    torch.distributed.init_process_group(
        backend(kind),
        store=store,
        # -1: torch reads them itself, with the address.
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device if kind == "cuda" else None,
    )


def get_rng_state() -> dict[str, Any]:
    """State of every generator of this process: Python, NumPy, torch, the device's, Megatron-Core's tracker."""
    from megatron.core import tensor_parallel

    host = torch.get_rng_state()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": host,
        "device": host if _stand_ins else torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore every generator to what `get_rng_state` returned."""
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in its dicts and lists on `device`."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    return value


def current() -> torch.device:
    """The device of this process."""
    return CPU if _stand_ins or not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())


def name(device: torch.device) -> str:
    """The product name of a CUDA device; empty for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def timing_event() -> torch.cuda.Event:
    """An event on the current stream that takes the device's time."""
    return torch.cuda.Event(enable_timing=True)


class SideCopies:
    """Copies to the host beside what the device computes; on the CPU they are made at once.

    Args:
        event: recorded behind the last of them.
    """

    def __init__(self, event: torch.cuda.Event | None = None):
        self._event = event

    def wait(self) -> None:
        """Until they are made; from any thread."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self) -> None:
        """Let the current stream wait for them, before it changes what they read."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


@contextmanager
def side_copies() -> Iterator[SideCopies]:
    """Copies that are enqueued in the block are made on a stream of their own, after what the current one does."""
    if current().type != "cuda":
        yield SideCopies()
        return
    event, side = torch.cuda.Event(), _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield SideCopies(event)
        event.record(side)


@cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def memory_statistics() -> dict[str, Any] | None:
    """Statistics of the CUDA allocator; None in a process that does not use CUDA."""
    # A CPU run on a machine with a GPU has CUDA but does not use it.
    return torch.cuda.memory_stats() if torch.cuda.is_initialized() else None


def release_cached_memory() -> None:
    """Release the unused memory of the CUDA allocator."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def record_memory_history(entries: int) -> None:
    """Record the newest `entries` allocations and frees of the CUDA allocator from now on."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def write_memory_history(path: Path) -> None:
    """Write the recorded history, for https://pytorch.org/memory_viz, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def start_cuda_profiler() -> None:
    """Start the range that `nsys profile --capture-range=cudaProfilerApi` records."""
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())


def stop_cuda_profiler() -> None:
    """End that range."""
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
