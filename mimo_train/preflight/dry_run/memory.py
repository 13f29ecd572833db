"""Bytes of tensors on the device, alive and at the peak, by what they are for and the line that made them.

A storage counts from the operation that makes it to its end, rounded to 512 bytes as CUDA's allocator does. Not
counted: the CUDA context, workspaces of kernels, communicators, and fragments.
"""

import weakref
from collections import Counter
from collections.abc import Iterable

import torch

from mimo_train.preflight.dry_run import places

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, COMMUNICATION = "activations", "logits", "communication"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, COMMUNICATION)

_BLOCK = 512

_BY_FILE = (
    (LOGITS, ("tensor_parallel/cross_entropy.py", "step/losses.py", "gpt_model.py", "models/common/language_module")),
    (OPTIMIZER, ("mimo_train/optim/", "megatron/core/optimizer/")),
    (COMMUNICATION, ("parallel/bridge/", "p2p_communication.py", "tensor_parallel/mappings.py", "parallel/context.py")),
)
"""Category of what the innermost lines make after the set-up; the first that fits. Else activations."""


class Memory:
    """What is alive, and what was at the peak.

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
        """A tensor that an operation has made, or has returned again."""
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
        """These storages are for that, whichever line has made them."""
        self._note_peak()
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                size, (_, line), ref = self._live[key]
                self._of[self._live[key][1]] -= size
                self._live[key] = size, (category, line), ref
                self._of[category, line] += size

    def end_setup(self) -> None:
        """Forget the peak of the set-up: what follows is that of the steps."""
        self._in_setup, self.peak = False, self.now
        self._is_noted = False

    def finish(self) -> None:
        """No operation follows."""
        self._note_peak()

    def _note_peak(self) -> None:
        # Counted when the first storage goes, instead of with each that comes: there are thousands.
        if not self._is_noted:
            self.at_peak, self._is_noted = Counter({what: size for what, size in self._of.items() if size}), True

    def _drop(self, key: int) -> None:
        if self.now == self.peak:
            self._note_peak()
        size, what, _ = self._live.pop(key)
        self.now -= size
        self._of[what] -= size

    def _what(self) -> tuple[str, str]:
        found = places.lines(4)
        line = found[0] if found else "?"
        if self._in_setup:
            return WEIGHTS, line
        for category, files in _BY_FILE:
            if any(file in each for each in found[:3] for file in files):
                return category, line
        return ACTIVATIONS, line
