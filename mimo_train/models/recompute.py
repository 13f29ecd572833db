"""Recomputation of layers, or of parts of them, in backward (`train.recompute`)."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mimo_train.config.schema_train import recompute_parts


def recompute_options(recompute: str) -> dict[str, Any]:
    """Return Megatron-Core's options for a value of `train.recompute`."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective"}
    modules = ["moe"] if "experts" in recompute_parts(recompute) else []
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def recompute_blocks(layer: TransformerLayer, recompute: str) -> None:
    """Let a layer keep the inputs alone of its attention and of its dense feed-forward block, if the config says so.

    Megatron-Core 0.19.2 recomputes core attention only, and loses the bias that a feed-forward block returns (its
    `CheckpointFunction` makes the parameter a result of the block).
    """
    parts = recompute_parts(recompute)
    blocks = {"attention": layer.self_attention, "mlp": None if layer.is_moe_layer else layer.mlp}
    for part, block in blocks.items():
        if part in parts and block is not None:
            of_adapters = layer.config.lora.rank > 0 and layer.config.lora.dropout > 0
            has_dropout = of_adapters or (part == "attention" and layer.config.attention_dropout > 0)
            block.forward = partial(_recomputed, block.forward, has_dropout)


def _recomputed(forward: Callable, has_dropout: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    random: dict[str, Any] = {"context_fn": _contexts} if has_dropout else {}
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=has_dropout, **random, **kwargs)


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of forward and of its repetition. torch repeats the states of its generators, and not those
    of Megatron-Core's tracker, by which tensor-parallel ranks drop different numbers."""
    return nullcontext(), _tracker_states(get_cuda_rng_tracker().get_states())


class NormOutputs:
    """Outputs of the norms in front of the blocks of a layer. Backward recomputes them from their inputs, which the
    norms keep anyway. Megatron-Core 0.19.2 frees their storage and shares another one with them, for which it compiles
    an extension in C++ (tensor_parallel/random.py:855). Hooks of autograd need none."""

    def __init__(self, layer: TransformerLayer):
        self._outputs: list[_NormOutput] | None = None
        """Those of this pass of the layer; None outside of it."""
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            if not isinstance(norm, IdentityOp):
                norm.register_forward_hook(self._add)

    @classmethod
    def of(cls, layer: TransformerLayer, recompute: str) -> "NormOutputs | None":
        """Return the outputs to recompute; None if a value of `train.recompute` keeps them."""
        return cls(layer) if "norms" in recompute_parts(recompute) else None

    def _add(self, norm: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self._outputs is not None and output.is_contiguous():
            self._outputs.append(_NormOutput(norm, inputs[0].detach(), output))

    @contextmanager
    def recomputed(self, pack: Callable, unpack: Callable) -> Iterator[None]:
        """Return the context of a forward pass of the layer. `pack` and `unpack` save and restore other tensors, and
        the inputs of norms."""
        outputs = self._outputs = list[_NormOutput]()

        def save(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            for output in outputs:
                if output.storage() is storage:
                    return output.view(tensor, pack)
            return pack(tensor)

        try:
            with saved_tensors_hooks(save, partial(_restore, unpack)):
                yield
        finally:
            self._outputs = None


class _NormOutput:
    """An output of a norm, and what it is recomputed from."""

    def __init__(self, norm: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor):
        self.norm = norm
        self._inputs: torch.Tensor | None = inputs
        self.storage = weakref.ref(output.untyped_storage())
        self.saved: Any = None
        """The inputs as they are saved, once an output is."""

    def view(self, tensor: torch.Tensor, pack: Callable) -> "_NormView":
        """Return what autograd keeps instead of a view of the output."""
        if self._inputs is not None:
            self.saved, self._inputs = pack(self._inputs), None
        return _NormView(self, tensor.shape, tensor.stride(), tensor.storage_offset())


class _NormView(NamedTuple):
    """A view of an output of a norm."""

    output: _NormOutput
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _restore(unpack: Callable, saved: Any) -> torch.Tensor:
    if not isinstance(saved, _NormView):
        return unpack(saved)
    output, *place = saved
    with torch.no_grad():
        # Hooks are of the forward pass.
        return output.norm.forward(unpack(output.saved)).contiguous().as_strided(*place)


@contextmanager
def _tracker_states(states: dict[str, Any]) -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(before)
