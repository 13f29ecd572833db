"""Tensors without memory: torch's fake tensors under `Counts`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from encoders import initial_weights
from mimo_train.preflight.dry_run.counts import ITEM, PAIRS, Counts

_WITHOUT_KERNEL = (
    "c10d::allreduce_coalesced_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
)
"""Collectives without a fake kernel in torch."""
_LOWER_RIGHT = "is_lower_right"


class FakeCounts(Counts):
    """Counts over fake tensors, with substitute results: values are 0, and sizes that depend on values are 0 unless
    `selected`, the number of values that a mask selects, is set."""

    selected = 0

    @staticmethod
    @contextmanager
    def on_the_host() -> Iterator[None]:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield

    def answer(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and _is_of_the_host(tensors, kwargs) and not name.startswith("c10d"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func._overloadname == "dtype_out":  # torch 2.11 describes a matmul of halves that adds to fp32 wrongly
            return kwargs["out"]
        if name == ITEM:
            return _zero(args[0])
        if name in _WITHOUT_KERNEL:
            return FakeWork().boxed()
        if name == "aten::nonzero":
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if name == "aten::masked_select":
            return args[0].new_empty(self.selected)
        return func(*args, **kwargs)


def _is_of_the_host(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """True for an operation on data that the program has read, if its result stays on the host: it has values."""
    goes = kwargs.get("device")
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (goes is None or goes.type == "cpu")


def _zero(tensor: torch.Tensor) -> Any:
    return False if tensor.dtype is torch.bool else 0.0 if tensor.dtype.is_floating_point else 0


def _nested(value: Any, shape: tuple[int, ...]) -> Any:
    return [_nested(value, shape[1:]) for _ in range(shape[0])] if shape else value


def enter(stack: ExitStack, counts: FakeCounts) -> None:
    """Make all tensors of this thread fake from here on."""
    # Code that only a device needs runs as if there were one; no device is touched.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    stack.enter_context(counts)
    torch.autograd.set_multithreading_enabled(False)
    # Backward turns function modes off otherwise, and with them the fake CUDA.
    torch.autograd.has_torch_function = lambda *_: False
    # Generator states are values that the program compares.
    torch.get_rng_state, torch.set_rng_state = outside(torch.get_rng_state), outside(torch.set_rng_state)
    # Weights have no values to initialize.
    initial_weights.next_seed, initial_weights.fill = (lambda: 0), (lambda *_, **__: None)
    FakeTensor.tolist = _tolist(counts)  # type: ignore[method-assign, assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def _tolist(counts: FakeCounts) -> Callable[[FakeTensor], Any]:
    def tolist(self: FakeTensor) -> Any:
        """Return all values with one wait; torch's own waits for each."""
        counts.wait(self, "values")
        return _nested(_zero(self), tuple(self.shape))

    return tolist


def become(old: torch.Tensor, new: torch.Tensor) -> None:
    """Do `old.data = new` across devices. Torch would swap fake tensors, which fails if there are weak references."""
    new = torch.nn.Parameter(new.detach(), old.requires_grad) if isinstance(old, torch.nn.Parameter) else new.detach()
    torch._C._swap_tensor_impl(old, new)
    if isinstance(old, FakeTensor) and isinstance(new, FakeTensor):
        old.fake_device = new.fake_device


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Replace `Module._apply`: parameters stay the same objects."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            new = fn(parameter)
        if new is not parameter and (new.device, new.dtype) != (parameter.device, parameter.dtype):
            become(parameter, new)
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self


def outside(function: Any) -> Any:
    """Return a function with real tensors, like those of the loader threads of a run."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with FakeCounts.on_the_host():
            return function(*args, **kwargs)

    return call


def install_attention(device: str) -> None:
    """Replace the inputs of attention that need values, for the rest of this process. torch's causal mask of fewer
    queries than keys does not mix with fake tensors: on the CPU a plain mask replaces it, on CUDA, whose kernel needs
    none, a marked tensor without memory. Ends of documents are marked with their number of (query, key) pairs."""
    from mimo_train.models import attention
    from mimo_train.models.documents import Documents

    def lower_right(queries: int, keys: int) -> torch.Tensor:
        if device == "cpu":
            return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
        mask = torch.ones(1, 1, dtype=torch.bool, device="cuda").expand(queries, keys)
        setattr(mask, _LOWER_RIGHT, True)
        return mask

    attention.causal_lower_right = lower_right
    original = Documents.cumulative

    def cumulative(self: Documents, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends = original(self, rank, device)
        pairs = sum(
            (span.last_query - span.first_query) * (span.last_key - span.first_key) for span in self.segments(rank)
        )
        setattr(ends[1], PAIRS, pairs)
        return ends

    Documents.cumulative = cumulative  # type: ignore[method-assign]


def is_lower_right(mask: torch.Tensor) -> bool:
    """True for the marked causal mask."""
    return getattr(mask, _LOWER_RIGHT, False)


class RmsNorm(torch.autograd.Function):
    """RMSNorm with the shapes and types of `aten::_fused_rms_norm` on CUDA, which keeps its input. On meta tensors
    torch 2.11 computes it operation by operation and keeps fp32 copies that no GPU has."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden size]; `inputs` [..., hidden size], `weight` [hidden size]."""
        rstd = inputs.new_empty((*inputs.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, rstd)
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the inputs and of the weight, if needed."""
        inputs, weight, _ = ctx.saved_tensors
        of_inputs, of_weight = ctx.needs_input_grad
        return torch.empty_like(inputs) if of_inputs else None, torch.empty_like(weight) if of_weight else None
