"""Fused kernels in a dry run, and the kernels of a layer with and without them.

Megatron-Core's compiled functions run one operation after the other, since no compiler takes tensors of a fake device,
and count as one kernel. Transformer Engine's kernels are replaced by Megatron-Core's operations for the same.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree

from mimo_train.preflight.dry_run.counts import Counts

_FLAGS = {
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"), False),
    **dict.fromkeys(("gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion"), False),
}
"""Options of a layer without fusions."""
_CALLERS = (
    *("_bias_dropout_add_func", "bias_dropout_add_unfused", "get_bias_dropout_add"),
    "fused_vocab_parallel_cross_entropy",
)
"""Functions of Megatron-Core's fusions that it does not compile, besides those that end in `_impl`."""


def install(counts: Counts) -> None:
    """Let fused functions count as one kernel, for the rest of this process."""
    from megatron.core.fusions import (
        fused_bias_dropout,
        fused_bias_geglu,
        fused_bias_gelu,
        fused_bias_swiglu,
        fused_cross_entropy,
    )
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

    from mimo_train.models import fusions

    for module in (fused_bias_dropout, fused_bias_geglu, fused_bias_gelu, fused_bias_swiglu, fused_cross_entropy):
        for name, value in list(vars(module).items()):
            is_fused = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if is_fused and not name.endswith("_impl") and name not in _CALLERS:
                setattr(module, name, counts.as_one_kernel(getattr(value, "_torchdynamo_orig_callable", value)))
    fusions.is_installed = lambda name: True  # type: ignore[assignment]

    def rotate(heads: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(heads, angles, rotary_interleaved=interleaved)

    rope_utils.fused_apply_rotary_pos_emb = _differentiable(counts, rotate)
    for name in vars(moe_utils):
        if name.startswith("fused_") and getattr(moe_utils, name) is None:
            setattr(moe_utils, name, _never_called)
    users = {
        token_dispatcher: ("permute", "unpermute", "sort_chunks_by_idxs"),
        router: (
            *("topk_routing_with_score_function", "compute_routing_scores_for_aux_loss"),
            "switch_load_balancing_loss_func",
        ),
    }
    for module, names in users.items():
        for name in names:
            setattr(module, name, _if_fused(counts, getattr(module, name)))


def _never_called(*_: Any, **__: Any) -> None:
    raise AssertionError("a kernel of Transformer Engine in a dry run")


def _if_fused(counts: Counts, function: Callable) -> Callable:
    """Return a function of Megatron-Core that is one kernel if its argument `fused` is true."""
    fused = _differentiable(counts, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = fused if kwargs.get("fused") else function
        return chosen(*args, **{**kwargs, "fused": False})

    return call


def _differentiable(counts: Counts, function: Callable) -> Callable:
    """Return a function that is one kernel forward and one backward, and keeps its inputs only."""

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def run(*tensors: torch.Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = _pytree.tree_unflatten(filled, spec)
            return function(*args, **kwargs)

        return _OneKernel.apply(counts, run, *(leaves[place] for place in places))

    return call


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: Counts, run: Callable, *tensors: torch.Tensor) -> Any:
        ctx.counts, ctx.run = counts, run
        ctx.save_for_backward(*tensors)
        return counts.as_one_kernel(run)(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        def differentiate() -> list[torch.Tensor | None]:
            inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in ctx.saved_tensors]
            with torch.enable_grad():
                outputs = ctx.run(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            reached = [
                number
                for number, output in enumerate(outputs)
                if isinstance(output, torch.Tensor) and output.requires_grad and gradients[number] is not None
            ]
            of_outputs = [outputs[number] for number in reached], [gradients[number] for number in reached]
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            of_inputs = iter(torch.autograd.grad(of_outputs[0], wanted, of_outputs[1], allow_unused=True))
            return [next(of_inputs) if tensor.requires_grad else None for tensor in inputs]

        return None, None, *ctx.counts.as_one_kernel(differentiate)()


class LayerKernels:
    """The kernels of one layer of each kind, forward and backward, of one microbatch."""

    def __init__(self, model: list[torch.nn.Module], counts: Counts):
        """Keep the inputs of the first layer of each kind in each module of this rank."""
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from mimo_train.models.parameters import modules_of

        self._counts, self._inputs = counts, dict[str, tuple]()
        self._layers: dict[str, tuple[Any, Any]] = {}
        self._hooks: list[Any] = []
        for name, chunks in modules_of(model).items():
            layers = [
                (part, chunk) for chunk in chunks for part in chunk.modules() if isinstance(part, TransformerLayer)
            ]
            kinds = {(type(layer.self_attention), type(layer.mlp)): (layer, chunk) for layer, chunk in reversed(layers)}
            for layer, chunk in kinds.values():
                label = f"{name}, layer {layer.layer_number}" if len(kinds) > 1 else name
                self._layers[label] = layer, chunk
                self._hooks.append(layer.register_forward_pre_hook(self._keeper(label), with_kwargs=True))

    def _keeper(self, label: str) -> Callable:
        def keep(_layer: Any, args: tuple, kwargs: dict) -> None:
            # Not the tensors themselves, which would live longer than in a run.
            self._inputs[label] = _pytree.tree_map(_Like.of, (args, kwargs))

        return keep

    def count(self) -> dict[str, tuple[int, int]]:
        """Return (kernels, kernels without fusions) of each kind of layer that ran."""
        for hook in self._hooks:
            hook.remove()
        counted = {}
        for label, inputs in self._inputs.items():
            layer, chunk = self._layers[label]
            with chunk.no_sync():
                fused = self._kernels(layer, inputs)
                with _without_fusions(layer):
                    counted[label] = fused, self._kernels(layer, inputs)
        return counted

    def _kernels(self, layer: Any, inputs: tuple[tuple, dict]) -> int:
        args, kwargs = _pytree.tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, _Like) else leaf, inputs)
        began = self._counts.kernels
        with torch.enable_grad():
            output, _ = layer(*args, **kwargs)
        if output.requires_grad:
            # The method would switch the fake device off.
            torch.autograd.backward([output], [torch.empty_like(output)])
        return self._counts.kernels - began


@dataclass(frozen=True)
class _Like:
    """The form of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Return the form of a tensor, and anything else as it is."""
        return cls(leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    def tensor(self) -> torch.Tensor:
        """Return a new tensor of this form."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


@contextmanager
def _without_fusions(layer: torch.nn.Module) -> Iterator[None]:
    """Switch the fusions of a layer off."""
    configs = {id(config): config for part in layer.modules() if (config := getattr(part, "config", None)) is not None}
    holders = [*configs.values(), *layer.modules()]
    with ExitStack() as stack:
        for holder in holders:
            for name, value in _FLAGS.items():
                if (before := getattr(holder, name, None)) is not None:
                    setattr(holder, name, value)
                    stack.callback(setattr, holder, name, before)
        yield
