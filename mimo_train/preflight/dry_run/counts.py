"""Counts of the steps of a rank: memory, messages, FLOPs, waits of the host for the device.

One dispatch mode sees every operation of torch, on real and on fake tensors. It rejects matmuls of two dtypes, which
fake tensors accept and a device does not.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.attention import varlen  # noqa: F401  # registers its operations
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import bmm_flop, flop_registry

from mimo_train.preflight.dry_run.observation import innermost_line, source_lines

aten = torch.ops.aten

_NO_KERNEL = ("empty", "new_empty", "detach", "alias", "lift_fresh", "set_", "resize_", "_unsafe_view", "record_stream")
"""Beginnings of names of operations that start no kernel. Views start none either."""
_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention")
_SIZE_WAITS = ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2")
ITEM = "aten::_local_scalar_dense"


class MixedDtypes(RuntimeError):
    """The operands of a matmul have two dtypes."""


class Counts(TorchDispatchMode):
    """Counts every operation.

    Attributes:
        messages: (operation, ranks of the group) -> [number, bytes].
        waits: (reason, line) -> times that the host waited for the device.
        waits_inside: the waits inside microbatches.
        flops: FLOPs of matmuls and attention.
        kernels: operations on tensors of the device that start a kernel; a fused function is one.
        memory: bytes of tensors on the device.
        depth: nested operations that are running.
    """

    def __init__(self, on_device: Callable[[torch.Tensor], bool]):
        """`on_device`: True for tensors on the device that is counted."""
        super().__init__()
        self.memory, self._on_device, self._is_inside = Memory(), on_device, False
        self.depth, self._is_fused = 0, False
        self.reset()

    def reset(self) -> None:
        """Reset all counts except memory."""
        self.messages: dict[tuple[str, int], list[int]] = {}
        self.waits: Counter[tuple[str, str]] = Counter()
        self.waits_inside: Counter[tuple[str, str]] = Counter()
        self.flops = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depth += 1
        try:
            return self._counted(func, args, kwargs or {})
        finally:
            self.depth -= 1

    def _counted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, operands = func._schema.name, args
        if func._overloadname.startswith("dtype"):  # a matmul of halves that adds to fp32
            operands = args[1:3]
        if name.startswith("c10d::"):
            self._count_message(name, args)
        elif name in _MATMULS:
            dtypes = {arg.dtype for arg in operands if isinstance(arg, torch.Tensor)}
            if len(dtypes) > 1:
                raise MixedDtypes(
                    f"{name}: operands are {' and '.join(sorted(map(str, dtypes)))}, at {innermost_line()}"
                )
        self._count_waits(name, func, args, kwargs)
        out = self.answer(func, name, args, kwargs)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            shapes = [(1, *each.shape) for each in operands] if operands is not args else []
            self.flops += bmm_flop(*shapes) if shapes else formula(args, kwargs, out)
        if not self._is_fused:
            has_kernel = not func.is_view and not name.removeprefix("aten::").startswith(_NO_KERNEL)
            self._note(out, has_kernel and not name.startswith("c10d::"))
        return out

    def _note(self, out: Any, has_kernel: bool) -> None:
        on_device = [
            each for each in _pytree.tree_leaves(out) if isinstance(each, torch.Tensor) and self._on_device(each)
        ]
        self.kernels += has_kernel and bool(on_device)
        for tensor in on_device:
            self.memory.note(tensor)

    def as_one_kernel(self, function: Callable) -> Callable:
        """Wrap a function that a compiler or a library makes one kernel: without the tensors inside of it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self._is_fused = self._is_fused, True
            try:
                out = function(*args, **kwargs)
            finally:
                self._is_fused = outer
            if not outer:
                self._note(out, True)
            return out

        return call

    def answer(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        return func(*args, **kwargs)

    def _count_message(self, name: str, args: Any) -> None:
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        size = torch.distributed.ProcessGroup.unbox(group).size() if group is not None else 0
        tensors = [leaf for leaf in _pytree.tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
        count = self.messages.setdefault((name.removeprefix("c10d::").rstrip("_"), size), [0, 0])
        count[0] += 1
        count[1] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def wait(self, tensor: torch.Tensor, what: str) -> None:
        """Record a wait of the host for a tensor, if the tensor is on the device."""
        if self._on_device(tensor):
            self.note_wait(what)

    def note_wait(self, what: str) -> None:
        """Record a wait of the host; a fused kernel waits for nothing."""
        if self._is_fused:
            return
        where = innermost_line()
        self.waits[what, where] += 1
        if self._is_inside:
            self.waits_inside[what, where] += 1

    def inside(self, function: Callable) -> Callable:
        """Wrap a function whose waits are inside microbatches."""

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
            # Assigning a single value by a mask is a masked fill, which does not wait.
            if masks and (name == "aten::index" or args[2].numel() > 1):
                self.wait(args[0], "a size")


def _attention_flops(query: Any, key: Any, value: Any) -> int:
    """Return the FLOPs of attention over [B, heads, S, D]; torch's formula requires equal numbers of heads."""
    batch, heads, queries, width = query
    batch *= heads
    return bmm_flop((batch, queries, width), (batch, width, key[2])) + bmm_flop(
        (batch, queries, key[2]), (batch, key[2], value[3])
    )


def _forward_attention(args: Any, kwargs: Any, out: Any) -> int:
    return _attention_flops(*(arg.shape for arg in args[:3]))


def _backward_attention(args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs as torch counts them: the scores again, and two matmuls for each of the two in forward."""
    _, query, key, value = (arg.shape for arg in args[:4])
    batch, heads, queries, width = query
    scores = bmm_flop((batch * heads, queries, width), (batch * heads, width, key[2]))
    return 2 * _attention_flops(query, key, value) + scores


def _forward_documents(args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of attention over [T, heads, D], each query with the keys of its document."""
    query, key_ends = args[0], args[4]
    return 2 * 2 * pairs_of(key_ends) * query.size(1) * query.size(2)


def _backward_documents(args: Any, kwargs: Any, out: Any) -> int:
    query, key_ends = args[1], args[7]
    return 5 * 2 * pairs_of(key_ends) * query.size(1) * query.size(2)


def _linear(args: Any, kwargs: Any, out: Any) -> int:
    return 2 * out.numel() * args[1].size(1)


def _registered(formula: Callable) -> Callable[[Any, Any, Any], int]:
    return lambda args, kwargs, out: formula(*args, **kwargs, out_val=out)


_FORMULAS: dict[Any, Callable[[Any, Any, Any], int]] = {
    **{packet: _registered(formula) for packet, formula in flop_registry.items()},
    aten._scaled_dot_product_flash_attention: _forward_attention,
    aten._scaled_dot_product_flash_attention_backward: _backward_attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _forward_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_attention,
    **({torch.ops.mkldnn._linear_pointwise: _linear} if torch.backends.mkldnn.is_available() else {}),
    torch.ops.torch_attn._varlen_attn: _forward_documents,
    torch.ops.torch_attn._varlen_attn_backward: _backward_documents,
}


PAIRS = "pairs"


def pairs_of(key_ends: torch.Tensor) -> int:
    """Return the number of (query, key) pairs of the documents whose keys end there."""
    return getattr(key_ends, PAIRS)


WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, COMMUNICATION = "activations", "logits", "communication"

_BLOCK = 512

_BY_FILE = (
    (
        LOGITS,
        (
            "tensor_parallel/cross_entropy.py",
            "step/losses.py",
            "gpt_model.py",
            "models/common/language_module",
            "models/output/",
        ),
    ),
    (OPTIMIZER, ("mimo_train/optim/", "megatron/core/optimizer/")),
    (COMMUNICATION, ("parallel/bridge/", "p2p_communication.py", "tensor_parallel/mappings.py", "parallel/context.py")),
)
"""Files by category. After the set-up a tensor gets the first category with a file in its innermost lines."""


class Memory:
    """Bytes of tensors on the device, now and at the peak, by category and by the line that made them.

    A storage counts while it lives, rounded to 512 bytes as in CUDA's allocator. Not counted: the CUDA context, kernel
    workspaces, communicators, fragmentation.

    Attributes:
        peak: bytes.
        at_peak: bytes by (category, line).
    """

    def __init__(self) -> None:
        self.peak, self.at_peak = 0, Counter[tuple[str, str]]()
        self.now = 0
        self._live: dict[int, tuple[int, tuple[str, str], weakref.ref]] = {}
        self._of: Counter[tuple[str, str]] = Counter()
        self._is_noted, self._in_setup = True, True

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor that an operation returned, unless its storage is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if not size:
            return
        what = self._what()
        self._live[key] = size, what, weakref.ref(storage, lambda _, key=key: self._drop(key))  # type: ignore[misc]
        self._of[what] += size
        self.now += size
        if self.now > self.peak:
            self.peak, self._is_noted = self.now, False

    def relabel(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count the storages of these tensors in `category`."""
        self._note_peak()
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                size, (_, line), ref = self._live[key]
                self._of[self._live[key][1]] -= size
                self._live[key] = size, (category, line), ref
                self._of[category, line] += size

    def end_setup(self) -> None:
        """Forget the peak of the set-up."""
        self._in_setup, self.peak = False, self.now
        self._is_noted = False

    def finish(self) -> None:
        """Record the peak after the last operation."""
        self._note_peak()

    def _note_peak(self) -> None:
        # Counted when a storage is freed, instead of at each of thousands of allocations.
        if not self._is_noted:
            self.at_peak, self._is_noted = Counter({what: size for what, size in self._of.items() if size}), True

    def _drop(self, key: int) -> None:
        if self.now == self.peak:
            self._note_peak()
        size, what, _ = self._live.pop(key)
        self.now -= size
        self._of[what] -= size

    def _what(self) -> tuple[str, str]:
        texts = source_lines(4)
        where = texts[0] if texts else "?"
        if self._in_setup:
            return WEIGHTS, where
        for category, files in _BY_FILE:
            if any(file in each for each in texts[:3] for file in files):
                return category, where
        return ACTIVATIONS, where
