"""The CPU backend runs unmodified Megatron-Core 0.19.2 in CPU processes over gloo.

Megatron-Core names CUDA devices, streams and the NCCL backend in its code (schedules.py:749, mimo/optimizer.py:65,
clip_grads.py:174, bridge_communicator.py:199, ...). `CpuBackend` implements those calls on the CPU. Other CUDA calls
raise `UnsupportedCudaCall` with their name and caller.
"""

import contextlib
import ctypes
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")


class UnsupportedCudaCall(RuntimeError):
    """A CPU run called a torch.cuda function that the CPU backend does not implement."""


class CpuBackend:
    """All replacements in one place; made once per process, before Megatron-Core is used."""

    def __init__(self) -> None:
        self._replace_factories()
        self._replace_cuda_functions()
        self._replace_rng()
        self._replace_groups()
        self._replace_moe_split_sizes()
        # mappings.py:154: ranks that share an expert have unequal parts of its rows; gloo gathers equal parts only.
        torch.distributed.all_gather = _of_unequal_parts(torch.distributed.all_gather)
        # Megatron-Core compiles small fusions for the GPU; on the CPU each would start a C++ compiler.
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager")
        else:  # torch's compiler is slow to import, so its stance is set at the first compilation
            torch.compile = _eager(torch.compile)

    @staticmethod
    def _replace_factories() -> None:
        """Replace every function that takes a device, once. A `TorchFunctionMode` would run in every call of torch,
        3,300 times in a step of the demo."""
        # `with torch.device(...)` looks for the originals, which the replacements call, in a set that is made once.
        constructors = {id(function) for function in _device_constructors()}
        factories = [name for name, function in vars(torch).items() if id(function) in constructors]
        for name in (*factories, *(f"{name}_like" for name in _LIKE)):
            setattr(torch, name, _on_the_cpu(getattr(torch, name)))
        for name in _NEW:
            setattr(torch.Tensor, name, _on_the_cpu(getattr(torch.Tensor, name)))
        tensor: Any = torch.Tensor
        tensor.to, tensor.type = _to_the_cpu(tensor.to), _with_names_of_cuda(tensor.type)
        tensor.cuda = lambda self, *args, **kwargs: self

    @staticmethod
    def _replace_cuda_functions() -> None:
        replaced = {
            "current_device": lambda: CPU,
            "set_device": _without_effect(),
            "synchronize": _without_effect(),
            "current_stream": lambda device=None: Stream(),
            "default_stream": lambda device=None: Stream(),
            "set_stream": _without_effect(),
            "stream": lambda stream=None: contextlib.nullcontext(),
            "Stream": Stream,
            "Event": Event,
            "device": lambda device=None: contextlib.nullcontext(),
            "empty_cache": _without_effect(),
            "reset_peak_memory_stats": _without_effect(),
            "get_rng_state": lambda device="cuda": torch.get_rng_state(),
            "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
            "manual_seed": torch.default_generator.manual_seed,
            # torch.manual_seed calls it after seeding the CPU.
            "manual_seed_all": _without_effect(),
            "FloatTensor": torch.FloatTensor,
            "HalfTensor": torch.HalfTensor,
            "BFloat16Tensor": torch.BFloat16Tensor,
            "IntTensor": torch.IntTensor,
            "LongTensor": torch.LongTensor,
        }
        for name in torch.cuda.__all__:
            original = getattr(torch.cuda, name, None)
            if name in replaced:
                setattr(torch.cuda, name, replaced[name])
            elif name not in _HARMLESS and inspect.isfunction(original):
                setattr(torch.cuda, name, _missing(name))

    @staticmethod
    def _replace_rng() -> None:
        from megatron.core.tensor_parallel import random as parallel_random

        parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        parallel_random._set_cuda_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)

    @staticmethod
    def _replace_groups() -> None:
        # bridge_communicator.py:199, 209 and colocated_communicator.py:92 name the NCCL backend.
        for name in ("new_group", "new_subgroups_by_enumeration"):
            original = getattr(torch.distributed, name)
            setattr(torch.distributed, name, _without_nccl(original))

    @staticmethod
    def _replace_moe_split_sizes() -> None:
        # token_dispatcher.py:927-943: all-to-all requires lists of numbers; CPU tensors were passed through as tensors.
        from megatron.core.transformer.moe import token_dispatcher

        original = token_dispatcher.maybe_move_tensor_to_cpu

        def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            moved = original(tensor, as_numpy=as_numpy, record_stream=record_stream)
            return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

        token_dispatcher.maybe_move_tensor_to_cpu = move


_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
"""Functions that have a `*_like`, which takes a device too."""
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
"""Tensor methods that take a device."""


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _is_cuda(device):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                # rope_utils.py:62 pins memory so that the host need not wait for the copy to the GPU.
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _to_the_cpu(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:

    @functools.wraps(to)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return move


def _with_names_of_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type` with CUDA type names, which clip_grads.py:174 and distrib_optimizer.py:401 compare."""

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            # Under a TorchFunctionMode torch calls this function once more, by its name.
            return f"torch.cuda.{type_of(self).rpartition('.')[2]}"
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
        return type_of(self, *args, **kwargs)

    return type_


def _is_cuda(device: Any) -> bool:
    """True if `device` names a CUDA device: 'cuda', 'cuda:1', torch.device('cuda'), or an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class Stream:
    """A stream that runs everything at once, in order."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return a completed event."""
        return event or Event()

    def synchronize(self) -> None:
        """Return at once."""


class Event:
    """A completed event on such a stream."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def record(self, stream: object = None) -> None:
        """Return at once."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True


def _eager(compiler: Callable) -> Callable:
    """Return `torch.compile` that switches to eager execution at its first call."""

    @functools.wraps(compiler)
    def compile_(*args: Any, **options: Any) -> Any:
        if torch.compile is compile_:
            torch.compile = compiler
        torch.compiler.set_stance("force_eager")
        return compiler(*args, **options)

    return compile_


def _without_effect() -> Callable[..., None]:
    """Return a function that does nothing. Each is a new object: torch.compile, which Megatron-Core imports,
    distinguishes functions of torch by identity."""
    return lambda *args, **kwargs: None


_HARMLESS = {
    "is_available",
    "is_initialized",
    "is_bf16_supported",
    "is_tf32_supported",
    "is_current_stream_capturing",
    "device_count",
    "init",
    "initial_seed",
    "memory_allocated",
    "max_memory_allocated",
    "seed",
    "seed_all",
    "get_sync_debug_mode",
}
"""Functions that return correct results without a GPU; torch itself calls some of them on CPU runs."""


def _missing(name: str) -> Callable[..., NoReturn]:
    @functools.wraps(getattr(torch.cuda, name))
    def call(*args: object, **kwargs: object) -> NoReturn:
        caller = sys._getframe(1)
        raise UnsupportedCudaCall(
            f"torch.cuda.{name} was called on a CPU run by {caller.f_code.co_filename}:{caller.f_lineno}; "
            "mimo_train/cpu/backend.py has no stand-in for it"
        )

    return call


def _without_nccl(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return original(*args, **kwargs)

    return call


def _of_unequal_parts(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: torch.distributed.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> torch.distributed.Work | None:
        rows = [len(part) for part in tensor_list] if tensor.dim() else [1]
        if len(set(rows)) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        original(parts, padded, group=group)
        for part, received in zip(tensor_list, parts, strict=True):
            part.copy_(received[: len(part)])
        return None

    return all_gather


_MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}
"""Options of malloc.h: M_MMAP_THRESHOLD, bytes of the largest piece that the heap serves; M_TRIM_THRESHOLD, bytes that
may be free before some are returned; M_TOP_PAD, bytes that a heap allocates ahead."""


def keep_freed_memory() -> None:
    """Let this process keep the memory that its tensors free, unless the environment sets options of glibc's `malloc`.

    glibc (2.36) returns memory to the system as soon as much of it is free at the end of its heap, and large pieces at
    once. A step frees nearly all that it allocates, so every step would map and clear its pages anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)
