"""Tensors without memory: torch's fake tensors under the counts of `Counts`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from encoders import initial_weights
from mimo_train.preflight.dry_run import fake_world
from mimo_train.preflight.dry_run.counts import ITEM, Counts


class FakeCounts(Counts):
    """Answers what no fake tensor can: values are 0, and sizes that depend on values none but where they are known.

    Attributes:
        selected: values that a mask selects.
    """

    selected = 0

    @staticmethod
    @contextmanager
    def on_the_host() -> Iterator[None]:
        """Tensors that are made in the block are real."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield

    def answer(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation."""
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and _is_of_the_host(tensors, kwargs) and not name.startswith("c10d"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name == ITEM:
            return _zero(args[0])
        answered, result = fake_world.answer(func, name, args)
        if answered:
            return result
        if name == "aten::nonzero":
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if name == "aten::masked_select":
            return args[0].new_empty(self.selected)
        return func(*args, **kwargs)


def _is_of_the_host(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is on data that the program has read, and stays on the host: that has values."""
    goes = kwargs.get("device")
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (goes is None or goes.type == "cpu")


def _zero(tensor: torch.Tensor) -> Any:
    return False if tensor.dtype is torch.bool else 0.0 if tensor.dtype.is_floating_point else 0


def _nested(value: Any, shape: tuple[int, ...]) -> Any:
    return [_nested(value, shape[1:]) for _ in range(shape[0])] if shape else value


def enter(stack: ExitStack, counts: FakeCounts) -> None:
    """Let all tensors of this thread be fake from here on."""
    # What only a device computes with is asked for as if there were one; no device is touched.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign, assignment]
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    stack.enter_context(counts)
    torch.autograd.set_multithreading_enabled(False)
    # Function modes are off inside of backward otherwise, and with them the stand-ins for CUDA.
    torch.autograd.has_torch_function = lambda *_: False
    # States of generators are values, by which the program compares them.
    torch.get_rng_state, torch.set_rng_state = outside(torch.get_rng_state), outside(torch.set_rng_state)
    # Weights have no values to be drawn.
    initial_weights.next_seed, initial_weights.fill = (lambda: 0), (lambda *_, **__: None)
    FakeTensor.tolist = _tolist(counts)  # type: ignore[method-assign, assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def _tolist(counts: FakeCounts) -> Callable[[FakeTensor], Any]:
    def tolist(self: FakeTensor) -> Any:
        """All values with one wait, where torch's asks for one after the other."""
        counts.wait(self, "values")
        return _nested(_zero(self), tuple(self.shape))

    return tolist


def become(old: torch.Tensor, new: torch.Tensor) -> None:
    """`old.data = new` across devices, for which torch swaps fake tensors, and not where there are weak references."""
    new = torch.nn.Parameter(new.detach(), old.requires_grad) if isinstance(old, torch.nn.Parameter) else new.detach()
    torch._C._swap_tensor_impl(old, new)
    if isinstance(old, FakeTensor) and isinstance(new, FakeTensor):
        old.fake_device = new.fake_device


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, whose parameters stay the same objects."""
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
    """A function whose tensors are real, as those of the reading threads of a run are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with FakeCounts.on_the_host():
            return function(*args, **kwargs)

    return call
