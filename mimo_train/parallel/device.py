"""The device of a process: CUDA, or the CPU backend that replaces it. Only this file distinguishes the two. A CUDA run
is left untouched. On a CPU run, `install("cpu")` installs the CPU backend, once per process."""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

from data.text_format import plural
from mimo_train.config.errors import UserError
from mimo_train.cpu.backend import CPU, CpuBackend, keep_freed_memory

_cpu_backends: list[CpuBackend] = []
"""The process's CPU backend. It changes other modules for the whole process, so there is at most one."""


@dataclass(frozen=True)
class Choice:
    """The device of a process, and a remark on the choice."""

    kind: str
    """cuda or cpu."""
    index: int = 0
    """Index of the CUDA device."""
    remark: str = ""
    """The reason why `auto` chose the CPU although there is a CUDA device."""


def choose(requested: str, processes: int = 1, local_rank: int = 0) -> Choice:
    """Return the device of this process. `auto` is CUDA if every process gets a device.

    Each process sees all devices of its machine and takes the one with its number, or sees only its own device (SLURM's
    `--gpus-per-task`). Processes of torchrun share one environment, so a single visible device is the same one.

    Args:
        requested: `run.device`: `auto`, `cuda` or `cpu`.
        processes: processes of the run on this machine; NCCL requires a device for each.
        local_rank: number of this process among them.

    Raises:
        UserError: `run.device` is unknown, or requires CUDA and there are not enough devices.
    """
    if requested not in ("auto", "cuda", "cpu"):
        raise UserError(f"run.device: must be auto, cuda or cpu, is {requested!r}")
    if requested == "cpu":
        return Choice("cpu")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available >= processes:
        return Choice("cuda", local_rank)
    visible = [index for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index]
    if available == len(visible) == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return Choice("cuda")  # the launcher gave this process one device, and other processes theirs
    too_few = (
        f"{plural(processes, 'process')} on this machine have {plural(available, 'CUDA device')}: use a layout of "
        "fewer ranks (layout=one_process), more nodes"
    )
    if requested == "auto":
        return Choice("cpu", remark=f"run.device=auto: on the CPU, since {too_few}" if available else "")
    if not available:
        raise UserError("run.device: is cuda, but torch sees no CUDA device here: use cpu or auto")
    raise UserError(f"run.device: is cuda, but {too_few}, or cpu")


def install(kind: str, index: int = 0, *, cpu_kernels: bool = False) -> torch.device:
    """Prepare this process for `kind` (`cuda` with device `index`, or `cpu`) and return its device. On the CPU,
    `cpu_kernels` (`run.cpu_kernels`) keeps the memory that the process frees."""
    if kind == "cuda":
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if not _cpu_backends:
        _cpu_backends.append(CpuBackend())
        if cpu_kernels:
            keep_freed_memory()
    return CPU


def remarks(layout_overlaps: bool) -> Iterator[str]:
    """Yield the environment settings of a CUDA process that cost speed or memory; `scripts/launch.sh` sets both.
    `layout_overlaps` is true if a module is tensor or context parallel, so that it communicates inside its layers."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    # Later architectures do not need it (NVIDIA's notes on Megatron-Core's `--sequence-parallel`).
    if layout_overlaps and connections != "1" and torch.cuda.get_device_capability()[0] < 10:
        yield (
            f"CUDA_DEVICE_MAX_CONNECTIONS is {connections or 'not set'}: with 1, messages of tensor and context "
            "parallel layers start before the computation that they run beside"
        )
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        yield (
            "PYTORCH_ALLOC_CONF is not set: with expandable_segments:True, microbatches of different lengths do not "
            "fragment the memory"
        )


def backend_of_groups() -> str | None:
    """Return the backend of all other groups; None is the world's. With NCCL alone, no group has a mesh of gloo
    connections. The few objects they exchange travel as device tensors."""
    return "nccl" if current().type == "cuda" else None


def init_process_group(kind: str, timeout_minutes: float, store: torch.distributed.Store | None = None) -> None:
    """Join the processes of the run over `store`, or by torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT). No `device_id` is bound (see `mimo_train.parallel.groups`)."""
    torch.distributed.init_process_group(
        # Of the world's group, which communicates tensors of either device and objects.
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=store,
        # -1: torch reads them itself, with the address.
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=timeout_minutes),
    )


def rendezvous_store() -> torch.distributed.Store:
    """Return the store of the run's rendezvous."""
    return torch.distributed.distributed_c10d._get_default_store()


def get_rng_state() -> dict[str, Any]:
    """Return the state of every generator of this process: Python, NumPy, torch, the device, Megatron-Core's
    tracker."""
    from megatron.core import tensor_parallel

    host = torch.get_rng_state()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": host,
        "device": host if _cpu_backends else torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore every generator to a state of `get_rng_state`."""
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in its dicts and lists on `device`."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else _copied(value, device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    return value


def tensor(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `torch.tensor` on a device; the host does not wait for the copy."""
    return _copied(torch.tensor(numbers, dtype=dtype), device)


def _copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to another device. Pinned memory, since the host would wait for a copy from other memory."""
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def current() -> torch.device:
    """Return the device of this process."""
    return CPU if _cpu_backends or not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())


def name(device: torch.device) -> str:
    """Return the product name of a CUDA device; empty for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def timing_event() -> torch.cuda.Event:
    """Return an event on the current stream that records the device's time."""
    return torch.cuda.Event(enable_timing=True)


class SideCopies:
    """Copies to the host that run alongside computation on the device. On the CPU they are made at once. `event` is
    recorded after the last copy."""

    def __init__(self, event: torch.cuda.Event | None = None):
        self._event = event

    def wait(self) -> None:
        """Wait until the copies are made. Callable from any thread."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self) -> None:
        """Let the current stream wait for the copies before it changes what they read."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


@contextmanager
def side_copies() -> Iterator[SideCopies]:
    """Run the copies that are enqueued in the block on their own stream, after the current stream's work."""
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
    """Return statistics of the CUDA allocator; None in a process that does not use CUDA."""
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
    """End the range that `start_cuda_profiler` started."""
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())


UNUSED = ("wandb", "torch.utils.tensorboard")


class _NotInstalled(MetaPathFinder):
    """A finder that reports the modules of `UNUSED` as not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in UNUSED:
            raise ModuleNotFoundError(f"{fullname} is not imported with Megatron-Core", name=fullname)


@contextmanager
def light_imports(device: str) -> Iterator[None]:
    """Import Megatron-Core in this block without its parts that a run does not use, and restore everything at the end.

    Megatron-Core 0.19.2 imports wandb and TensorBoard for its timers. It also compiles its small fusions where they are
    defined, which imports torch's compiler. Together they take a third of the time until a run's first step.

    Args:
        device: `run.device`. With `cpu`, or `auto` if torch finds no CUDA, functions defined in the block stay
            uncompiled.
    """
    finder, compiler = _NotInstalled(), torch.compile
    sys.meta_path.insert(0, finder)
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compiler
        sys.meta_path.remove(finder)


def _uncompiled(model: Callable | None = None, **options: Any) -> Callable:
    return model if model is not None else lambda function: function
