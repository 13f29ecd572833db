"""Recomputation of layers, or of parts of them, in backward (`train.recompute`)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer
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


@contextmanager
def _tracker_states(states: dict[str, Any]) -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(before)
