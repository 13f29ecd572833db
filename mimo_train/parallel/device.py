"""The device of a process: CUDA, or the CPU with a stand-in for CUDA. The only file that distinguishes the two.

A CUDA run is left untouched; on a CPU run, `install("cpu")` installs the stand-in, once per process.
"""

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
from mimo_train.cpu.backend import CPU, StandIn, keep_freed_memory

_stand_ins: list[StandIn] = []
"""The process's stand-in; it changes other modules for the whole process, so there is one at most."""


@dataclass(frozen=True)
class Choice:
    """The device of a process, and what there is to say about it."""

    kind: str
    """cuda or cpu."""
    index: int = 0
    """Of the CUDA device."""
    remark: str = ""
    """Why `auto` is the CPU where there is a CUDA device."""


def choose(requested: str, processes: int = 1, local_rank: int = 0) -> Choice:
    """`auto`, `cuda` or `cpu` -> the device of this process; auto is CUDA where every process gets a device.

    Processes see all devices of their machine, and each takes that of its number; or each sees one, its own, as SLURM's
    `--gpus-per-task` gives them. Processes of torchrun have one environment, and see the same one.

    Args:
        requested: `run.device`.
        processes: processes of the run on this machine; NCCL wants a device for each.
        local_rank: number of this process among them.

    Raises:
        UserError: `run.device` is unknown, or asks for CUDA where there are not enough devices.
    """
    if requested not in ("auto", "cuda", "cpu"):
        raise UserError(f"run.device: must be auto, cuda or cpu, is {requested!r}")
    if requested == "cpu":
        return Choice("cpu")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available >= processes:
        return Choice("cuda", local_rank)
    if available == 1 and _own_device():
        return Choice("cuda")
    if requested == "auto":
        said = f"run.device=auto: on the CPU, since {_too_few(processes, available)}"
        return Choice("cpu", remark=said if available else "")
    if not available:
        raise UserError("run.device: is cuda, but torch sees no CUDA device here: use cpu or auto")
    raise UserError(f"run.device: is cuda, but {_too_few(processes, available)}, or cpu")


def _too_few(processes: int, available: int) -> str:
    return (
        f"{plural(processes, 'process')} on this machine have {plural(available, 'CUDA device')}: use a layout of "
        "fewer ranks (layout=one_process), more nodes"
    )


def _own_device() -> bool:
    """Whether whoever started this process has given it one device, and others theirs."""
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return len(visible) == 1 and "TORCHELASTIC_RUN_ID" not in os.environ


def install(kind: str, index: int = 0, *, cpu_kernels: bool = False) -> torch.device:
    """Prepare this process for `kind` (`cuda` or `cpu`) and return its device.

    For `cpu` the stand-in is installed, once per process; for `cuda` the device of this index is selected.

    Args:
        cpu_kernels: `run.cpu_kernels`; on the CPU, whether the process keeps the memory that it frees.
    """
    if kind == "cuda":
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if not _stand_ins:
        _stand_ins.append(StandIn())
        if cpu_kernels:
            keep_freed_memory()
    return CPU


def identity(device: torch.device) -> str:
    """What tells a CUDA device from all others; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def remarks(layout_overlaps: bool) -> Iterator[str]:
    """What in the environment of a CUDA process costs speed or memory; `scripts/launch.sh` sets both.

    Args:
        layout_overlaps: whether a module sends inside its layers while it computes: tensor or context parallel.
    """
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    # Later architectures do not need it (NVIDIA's notes to Megatron-Core's `--sequence-parallel`).
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


def backend(kind: str) -> str:
    """Backends of the world's group: tensors of either device, and objects, can be communicated."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def backend_of_groups() -> str | None:
    """The backend of all other groups; None is the world's. With NCCL alone none has a mesh of gloo's connections
    beside it; the few objects that they exchange travel as tensors of the device."""
    return "nccl" if current().type == "cuda" else None


def init_process_group(kind: str, timeout_minutes: float, store: torch.distributed.Store | None = None) -> None:
    """Join the processes of the run by torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or over
    `store`. No `device_id` is bound (see `mimo_train.parallel.groups`)."""
    torch.distributed.init_process_group(
        backend(kind),
        store=store,
        # -1: torch reads them itself, with the address.
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=timeout_minutes),
    )


def meeting() -> torch.distributed.Store:
    """The store by which the processes of the run have met."""
    return torch.distributed.distributed_c10d._get_default_store()


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
        return value if value.device == device else _copied(value, device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    return value


def tensor(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.tensor` on a device, for whose copy the host does not wait."""
    return _copied(torch.tensor(numbers, dtype=dtype), device)


def _copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on another device; the host waits for one from memory that is not pinned, behind all that is queued."""
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


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


REFUSED = ("wandb", "torch.utils.tensorboard")


class _Refusal(MetaPathFinder):
    """Reports the modules of `REFUSED` as not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in REFUSED:
            raise ModuleNotFoundError(f"{fullname} is not imported with Megatron-Core", name=fullname)


@contextmanager
def light_imports(device: str) -> Iterator[None]:
    """Import Megatron-Core in this block without what a run does not use of it.

    Megatron-Core 0.19.2 imports wandb and TensorBoard for timers that report to them, and compiles its small fusions
    where they are defined, which imports torch's compiler; on the CPU they run eagerly. Together they take a third of
    the time until a run's first step. After the block everything is as released.

    Args:
        device: `run.device`; what is defined in the block is not compiled with `cpu`, nor with `auto` where torch finds
            no CUDA.
    """
    refusal, compiler = _Refusal(), torch.compile
    sys.meta_path.insert(0, refusal)
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compiler
        sys.meta_path.remove(refusal)


def _uncompiled(model: Callable | None = None, **options: Any) -> Callable:
    """Replace `torch.compile`, also as a decorator with options."""
    return model if model is not None else lambda function: function
