"""What the steps of one rank do: memory, messages, floating point operations, waits of the host; and the faults that
only a device would show.

One mode sees every operation of torch, on real tensors as on fake ones. What fake tensors pass over and a device does
not is an error here: operands of two dtypes in a product of matrices.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import varlen  # noqa: F401  # registers its operations
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import bmm_flop, flop_registry

from mimo_train.preflight.dry_run import places
from mimo_train.preflight.dry_run.fake_attention import pairs_of
from mimo_train.preflight.dry_run.memory import Memory

aten = torch.ops.aten

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention")
_SIZE_WAITS = ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2")
ITEM = "aten::_local_scalar_dense"


class MixedDtypes(RuntimeError):
    """Operands of a product of matrices have two dtypes."""


class Counts(TorchDispatchMode):
    """Counts every operation.

    Attributes:
        messages: (operation, ranks of the group) -> [number, bytes].
        waits: (what, line) -> number; of the host for the device.
        waits_inside: those of them inside of microbatches.
        flops: of products of matrices and attention.
        memory: of tensors on the device.
        depth: operations that are under way, one inside of the other.
    """

    def __init__(self, on_device: Callable[[torch.Tensor], bool]):
        """`on_device`: whether a tensor is on the device that is counted."""
        super().__init__()
        self.memory, self._on_device, self._is_inside = Memory(), on_device, False
        self.depth = 0
        self.reset()

    def reset(self) -> None:
        """Count from 0, but for memory."""
        self.messages: dict[tuple[str, int], list[int]] = {}
        self.waits: Counter[tuple[str, str]] = Counter()
        self.waits_inside: Counter[tuple[str, str]] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depth += 1
        try:
            return self._counted(func, args, kwargs or {})
        finally:
            self.depth -= 1

    def _counted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self._count_message(name, args)
        elif name in _PRODUCTS:
            dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
            if len(dtypes) > 1:
                raise MixedDtypes(f"{name}: operands are {' and '.join(sorted(map(str, dtypes)))}, at {places.line()}")
        self._count_waits(name, func, args, kwargs)
        out = self.answer(func, name, args, kwargs)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(args, kwargs, out)
        for tensor in _pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and self._on_device(tensor):
                self.memory.note(tensor)
        return out

    def answer(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation."""
        return func(*args, **kwargs)

    def _count_message(self, name: str, args: Any) -> None:
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        size = torch.distributed.ProcessGroup.unbox(group).size() if group is not None else 0
        tensors = [leaf for leaf in _pytree.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
        count = self.messages.setdefault((name.removeprefix("c10d::").rstrip("_"), size), [0, 0])
        count[0] += 1
        count[1] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def wait(self, tensor: torch.Tensor, what: str) -> None:
        """The host waits for a tensor, if that is on the device."""
        if self._on_device(tensor):
            self.note_wait(what)

    def note_wait(self, what: str) -> None:
        """The host waits."""
        where = places.line()
        self.waits[what, where] += 1
        if self._is_inside:
            self.waits_inside[what, where] += 1

    def inside(self, function: Callable) -> Callable:
        """A function whose waits are those inside of microbatches."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._is_inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = False

        return call

    def _count_waits(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if name == ITEM:
            self.wait(args[0], "a value")
        elif name in _SIZE_WAITS:
            self.wait(args[0], "a size")
        elif name == "aten::index" or name.startswith("aten::index_put"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            # A single value that is put by a mask is a masked fill.
            if masks and (name == "aten::index" or args[2].numel() > 1):
                self.wait(args[0], "a size")


def _attention_flops(query: Any, key: Any, value: Any) -> int:
    """Of [B, heads, S, D]; torch's own formula wants as many heads of keys as of queries."""
    batch, heads, queries, width = query
    batch *= heads
    return bmm_flop((batch, queries, width), (batch, width, key[2])) + bmm_flop(
        (batch, queries, key[2]), (batch, key[2], value[3])
    )


def _forward_attention(args: Any, kwargs: Any, out: Any) -> int:
    return _attention_flops(*(arg.shape for arg in args[:3]))


def _backward_attention(args: Any, kwargs: Any, out: Any) -> int:
    """As torch counts it: the scores once more, and two products for each of the two of the forward pass."""
    _, query, key, value = (arg.shape for arg in args[:4])
    batch, heads, queries, width = query
    scores = bmm_flop((batch * heads, queries, width), (batch * heads, width, key[2]))
    return 2 * _attention_flops(query, key, value) + scores


def _forward_documents(args: Any, kwargs: Any, out: Any) -> int:
    """Of [T, heads, D], each query with the keys of its document alone."""
    query, key_ends = args[0], args[4]
    return 2 * 2 * pairs_of(key_ends) * query.size(1) * query.size(2)


def _backward_documents(args: Any, kwargs: Any, out: Any) -> int:
    """As `_backward_attention`."""
    query, key_ends = args[1], args[7]
    return 5 * 2 * pairs_of(key_ends) * query.size(1) * query.size(2)


def _registered(formula: Callable) -> Callable[[Any, Any, Any], int]:
    return lambda args, kwargs, out: formula(*args, **kwargs, out_val=out)


_FORMULAS: dict[Any, Callable[[Any, Any, Any], int]] = {
    **{packet: _registered(formula) for packet, formula in flop_registry.items()},
    aten._scaled_dot_product_flash_attention: _forward_attention,
    aten._scaled_dot_product_flash_attention_backward: _backward_attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _forward_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_attention,
    torch.ops.torch_attn._varlen_attn: _forward_documents,
    torch.ops.torch_attn._varlen_attn_backward: _backward_documents,
}
