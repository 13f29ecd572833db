"""A fake CUDA device, for the code paths of a run that require a GPU.

Tensors on CUDA are on torch's meta device and report `cuda:0`: with a CUDA build of torch and no driver, autograd
cannot run over fake tensors on 'cuda'. Mixing CPU and meta tensors is an error, like mixing CPU and CUDA tensors.
"""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from mimo_train.cpu.backend import Event, Stream
from mimo_train.preflight.dry_run.counts import Counts
from mimo_train.preflight.dry_run.fake_tensors import RmsNorm, become, is_lower_right

_PINNED = "is_pinned_here"
META, SHOWN = torch.device("meta"), torch.device("cuda", 0)
CAPABILITY, MEMORY = (9, 0), 80 << 30

_TYPES = {
    torch.float32: "FloatTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.float64: "DoubleTensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}
_DEVICE = torch.Tensor.device.__get__
_IS_CUDA, _IS_CPU = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ATTEND = torch.nn.functional.scaled_dot_product_attention
_RMS_NORM = torch.nn.functional.rms_norm


def is_on_device(tensor: torch.Tensor) -> bool:
    """True if a tensor is on the fake device."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta"


def _where(device: Any) -> Any:
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or str(device).startswith("cuda"):
        return META
    return device


class CudaNames(TorchFunctionMode):
    """Replaces CUDA by the meta device in arguments, and meta by CUDA in results."""

    def __init__(self, counts: Counts):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _DEVICE:
            device = func(*args)
            return SHOWN if device.type == "meta" else device
        if func == _IS_CUDA:
            return is_on_device(args[0])
        if func == _IS_CPU:
            return _DEVICE(args[0]).type == "cpu"
        if func == _SET_DATA and _DEVICE(args[0]) != _DEVICE(args[1]):
            return become(args[0], args[1])
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if kwargs.get("device") is not None:
            kwargs["device"] = _where(kwargs["device"])
        return func(*args, **kwargs)

    def _to(self, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        rest = [_where(each) if isinstance(each, (str, int, torch.device)) else each for each in rest]
        if kwargs.get("device") is not None:
            kwargs["device"] = _where(kwargs["device"])
        moved = torch.Tensor.to(tensor, *rest, **kwargs)
        if is_on_device(tensor) and not is_on_device(moved):
            self._wait("a copy to the host")
        elif not is_on_device(tensor) and is_on_device(moved) and not _is_pinned(tensor):
            self._wait("a copy of memory that is not pinned")
        return moved

    def _cuda(self, args: Any, kwargs: Any) -> Any:
        return self._to((args[0], META), {"non_blocking": kwargs.get("non_blocking", False)})

    def _cpu(self, args: Any, kwargs: Any) -> Any:
        return self._to((args[0], torch.device("cpu")), {})

    def _pin_memory(self, args: Any, kwargs: Any) -> Any:
        pinned = torch.Tensor.detach(args[0])
        setattr(pinned, _PINNED, True)
        return pinned

    def _type(self, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and is_on_device(args[0]):
            return f"torch.cuda.{_TYPES[args[0].dtype]}"
        return torch.Tensor.type(*args, **kwargs)

    def _tensor(self, args: Any, kwargs: Any) -> Any:
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        made = torch.tensor(*args, **kwargs)
        made = self._pin_memory((made,), {}) if pinned else made
        return made if device is None else self._to((made, device), {})

    def _attend(self, args: Any, kwargs: Any) -> Any:
        query, key, value = args[:3]
        mask, is_causal = kwargs.get("attn_mask"), kwargs.get("is_causal", False)
        if mask is not None and is_lower_right(mask):
            mask, is_causal = None, True
        if mask is None and is_on_device(query):
            # On meta tensors torch takes the unfused kernel; a GPU takes a fused one, which keeps no scores.
            # Its description on meta tensors requires values as wide as keys.
            width = value.size(-1)
            value = torch.nn.functional.pad(value, (0, key.size(-1) - width)) if width < key.size(-1) else value
            attended = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, kwargs.get("dropout_p", 0.0), is_causal, False, scale=kwargs.get("scale")
            )[0]
            return attended[..., :width]
        if mask is not None and is_on_device(query) and query.size(1) == key.size(1):
            # Torch makes numbers of true and false, and keeps them for the backward pass.
            bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
            bias = bias.expand(*query.shape[:3], key.size(2))
            options = True, kwargs.get("dropout_p", 0.0), is_causal
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            return efficient(query, key, value, bias, *options, scale=kwargs.get("scale"))[0]
        return _ATTEND(*args, **kwargs)

    def _rms_norm(self, args: Any, kwargs: Any) -> Any:
        inputs, _, *rest = args
        weight = kwargs.get("weight", rest[0] if rest else None)
        # A GPU has no kernel either if the types differ.
        if is_on_device(inputs) and weight is not None and weight.dtype == inputs.dtype:
            return RmsNorm.apply(inputs, weight)
        return _RMS_NORM(*args, **kwargs)

    def _wait(self, what: str) -> None:
        self._counts.note_wait(what)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _PINNED, False)


_SPECIAL: dict[Any, Callable[[CudaNames, Any, Any], Any]] = {
    torch.Tensor.to: CudaNames._to,
    torch.Tensor.cuda: CudaNames._cuda,
    torch.Tensor.cpu: CudaNames._cpu,
    torch.Tensor.pin_memory: CudaNames._pin_memory,
    torch.Tensor.type: CudaNames._type,
    torch.tensor: CudaNames._tensor,
    _ATTEND: CudaNames._attend,
    _RMS_NORM: CudaNames._rms_norm,
}


class _Stream(Stream):
    device = SHOWN
    waited: Callable[[str], None]

    def synchronize(self) -> None:
        type(self).waited("a stream")


class _Event(Event):
    waited: Callable[[str], None]

    def synchronize(self) -> None:
        type(self).waited("an event")

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _Generator:
    device = SHOWN

    def get_state(self) -> torch.Tensor:
        return _state()

    graphsafe_get_state = clone_state = get_state

    def set_state(self, state: object) -> None:
        """Do nothing."""

    graphsafe_set_state = set_state

    def manual_seed(self, seed: int) -> "_Generator":
        return self

    def initial_seed(self) -> int:
        return 0

    seed = initial_seed


def _state(device: object = "cuda") -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def install(counts: Counts) -> CudaNames:
    """Install the device in torch, for the rest of this process; return the mode to enter above fake tensors."""
    waited = counts.note_wait
    _Stream.waited = _Event.waited = staticmethod(waited)
    properties = types.SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=MEMORY, name="no GPU", uuid=""
    )
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1 << 16,
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: waited("the device"),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream=None: contextlib.nullcontext(),
        "device": lambda device=None: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "get_rng_state": _state,
        "get_device_name": lambda device=None: "no GPU",
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "memory_stats": lambda device=None: {},
        "default_generators": tuple(_Generator() for _ in range(8)),
        "_lazy_call": lambda callable, **kwargs: callable(),
    }
    replacements |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *args: 0)
    replacements["max_memory_reserved"] = lambda *args: 0
    for name in ("set_device", "init", "_lazy_init", "set_stream", "empty_cache", "reset_peak_memory_stats",
                 "manual_seed", "manual_seed_all", "set_rng_state"):  # fmt: skip
        replacements[name] = _nothing
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.accelerator.current_stream = replacements["current_stream"]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]
    import torch.cuda.random as generators

    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "current_device", "_lazy_init"):
        setattr(generators, name, replacements[name])
    from torch._subclasses import fake_tensor

    of_fake = FakeTensor.device.fget  # type: ignore[attr-defined]

    def shown(tensor: FakeTensor) -> torch.device:
        device = of_fake(tensor)
        # Inside an operation torch asks for the actual device.
        return SHOWN if device.type == "meta" and not counts.depth else device

    FakeTensor.device = property(shown)  # type: ignore[assignment]
    fake_tensor.init_gpu_context = _nothing  # type: ignore[assignment]
    return CudaNames(counts)
