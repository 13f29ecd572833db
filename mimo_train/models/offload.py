"""Activations of layers on the host between forward and backward (`train.offload_activations`).

Megatron-Core 0.19.2 has two kinds. `cpu_offloading` excludes pipelines and recomputation
(transformer_config.py:1714), and needs Transformer Engine. `fine_grained_activation_offloading` needs calls of its
manager for every microbatch and chunk, which only its own `GPTModel` makes. Here hooks of autograd copy what a layer
saves: any layer, schedule and recomputation.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

LEAST_BYTES = 2**20
"""Minimum size of a tensor that is worth a copy."""


class Offload:
    """Copies what the layers of one model chunk save to pinned memory while the next layer runs, and back while the
    layer behind it runs backward."""

    def __init__(self) -> None:
        # What autograd saves keeps a group alive, and nothing else may.
        self._last: Callable[[], _Group | None] = lambda: None

    def hooks(self, is_first: bool) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return functions that save and restore the tensors of a forward pass of a layer; `is_first`: of its chunk."""
        group = _Group(None if is_first else self._last())
        self._last = weakref.ref(group)
        return group.pack, group.unpack


class _Saved:
    """A tensor on the host, and from shortly before its use on the device."""

    value: torch.Tensor | None
    """On the device, once it is fetched."""

    def __init__(self, tensor: torch.Tensor):
        side = _streams()[0]
        self.device, self.value, self._ready = tensor.device, None, torch.cuda.Event()
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._ready.record(side)
        if tensor.is_cuda:
            tensor.record_stream(side)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        side = _streams()[1]
        self.value = torch.empty_like(self._host, device=self.device)
        side.wait_stream(torch.cuda.current_stream())
        side.wait_event(self._ready)
        with torch.cuda.stream(side):
            self.value.copy_(self._host, non_blocking=True)
        if self.value.is_cuda:
            self.value.record_stream(side)


class _Group:
    """What one layer saves in one microbatch."""

    def __init__(self, previous: "_Group | None"):
        """`previous`: of the layer before, which runs backward next."""
        self._previous = previous
        self._copies: list[_Saved] = []
        self._by_place: dict[tuple, tuple[weakref.ref, _Saved]] = {}
        self._arrived: torch.cuda.Event | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """Return what autograd keeps instead of a tensor. Tensors that are saved twice are copied once."""
        if not _is_activation(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._by_place:
            reference, saved = self._by_place[key]
            if reference() is storage:  # and not a later storage in the place of an earlier one
                return saved
        saved = _Saved(tensor)
        self._copies.append(saved)
        self._by_place[key] = weakref.ref(storage), saved
        return saved

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        """Return the tensor, and start the copies of the layer that runs backward next."""
        if isinstance(saved, torch.Tensor):
            return saved
        arrived = self.fetch()
        if self._previous is not None:
            self._previous.fetch()
            self._previous = None
        torch.cuda.current_stream().wait_event(arrived)
        assert saved.value is not None
        return saved.value

    def fetch(self) -> torch.cuda.Event:
        """Start the copies of this layer once, and return the event behind them."""
        if self._arrived is None:
            for saved in self._copies:
                saved.fetch()
            self._arrived = torch.cuda.Event()
            self._arrived.record(_streams()[1])
        return self._arrived


def _is_activation(tensor: torch.Tensor) -> bool:
    """True for a large tensor that no parameter holds. Expanded ones stay: a mask of all heads would be copied for each
    of them."""
    is_weight = any(isinstance(each, torch.nn.Parameter) for each in (tensor, tensor._base))
    is_expanded = tensor.nbytes > tensor.untyped_storage().nbytes()
    return tensor.is_floating_point() and not is_weight and not is_expanded and tensor.nbytes >= LEAST_BYTES


@cache
def _streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of copies to the host and of copies to the device."""
    return torch.cuda.Stream(), torch.cuda.Stream()
