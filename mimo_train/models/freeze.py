"""Freezing: the parameters of a module that are not trained, or only from some step on."""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock

from mimo_train.config.errors import UserError
from mimo_train.config.parts import PARTS
from mimo_train.models.parameters import global_names


def freeze(chunks: list[torch.nn.Module], patterns: list[str], key: str, stages: dist.ProcessGroup) -> None:
    """Stop gradients of every parameter whose name matches one of `patterns`. Collective over `stages`.

    Args:
        chunks: this rank's chunks of one module, before data-parallel wrapping.
        patterns: `encoder`, `projector`, `llm`, or shell patterns of parameter names (see `global_names`).
        key: config key, for the message.
        stages: the pipeline group of the module.

    Raises:
        UserError: a pattern matches no parameter of any stage, or a bias would silently not learn.
    """
    for parameters in _matches(chunks, patterns, key, stages).values():
        for parameter in parameters:
            parameter.requires_grad_(False)
    _require_learning_biases(chunks, {}, key, stages)


def release_steps(
    chunks: list[torch.nn.Module], until: dict[str, int], key: str, stages: dist.ProcessGroup
) -> dict[torch.nn.Parameter, int]:
    """Return the step from which each parameter of `until` is trained: the latest of its matching entries. Parameters
    that `freeze` has frozen stay frozen. They are omitted, like those of step 0. Arguments and errors are as in
    `freeze`; `until` has steps by pattern. Collective over `stages`."""
    steps: dict[torch.nn.Parameter, int] = {}
    for pattern, parameters in _matches(chunks, list(until), key, stages).items():
        for parameter in parameters:
            if parameter.requires_grad and until[pattern] > 0:
                steps[parameter] = max(until[pattern], steps.get(parameter, 0))
    _require_learning_biases(chunks, steps, key, stages)
    return steps


def _require_learning_biases(
    chunks: list[torch.nn.Module], steps: dict[torch.nn.Parameter, int], key: str, stages: dist.ProcessGroup
) -> None:
    """Reject a trained bias with a frozen weight in Transformer Engine's layers. Collective over `stages`. Their
    backward pass makes the gradient of both at once, or of none (pytorch/module/linear.py, `requires_wgrad`). `steps`
    has the step from which a parameter is trained, if it is frozen at first."""

    def trained_from(parameter: Any) -> float:
        return steps.get(parameter, 0) if parameter.requires_grad else math.inf

    wrong: list[tuple[str, str]] = []
    for chunk in chunks:
        names = {id(parameter): name for name, parameter in global_names(chunk).items()}
        for module in chunk.modules():
            # False on layers of Megatron-Core that add the bias inside Transformer Engine, not where autograd sees it.
            bias = getattr(module, "bias", None) if getattr(module, "te_return_bias", None) is False else None
            if not isinstance(bias, torch.nn.Parameter) or module.parallel_mode == "row":
                continue
            if trained_from(module.weight) > trained_from(bias):
                wrong.append((names[id(module.weight)], names[id(bias)]))
    for weight, beside in chain(*_of_all_stages(wrong, stages)):
        raise UserError(
            f"{key}: {weight} is frozen for longer than {beside}, to which Transformer Engine gives a gradient "
            f"only together with it: freeze {beside} for as long, or leave {weight} out"
        )


def let_recomputed_layers_learn(chunks: list[torch.nn.Module]) -> None:
    """Compute the gradients of trainable weights in recomputed layers when nothing before them is trainable.
    Recomputation gives a layer a backward pass only if its input requires a gradient (tensor_parallel/random.py,
    `CheckpointFunction`, in Megatron-Core 0.19.2). After a frozen embedding it does not."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerBlock):
                module.register_forward_pre_hook(_ask_for_input_gradient, with_kwargs=True)


def _ask_for_input_gradient(block: TransformerBlock, arguments: tuple, options: dict) -> tuple[tuple, dict] | None:
    inputs = options["hidden_states"] if "hidden_states" in options else arguments[0]
    if inputs is None or inputs.requires_grad or not torch.is_grad_enabled():
        return None
    if not any(parameter.requires_grad for parameter in block.parameters()):
        return None
    inputs = inputs.detach().requires_grad_()
    if "hidden_states" in options:
        return arguments, {**options, "hidden_states": inputs}
    return (inputs, *arguments[1:]), options


def let_biases_learn(chunks: list[torch.nn.Module]) -> None:
    """Compute the gradients of trained biases next to weights that are frozen, for the whole run or until a step.

    Megatron-Core 0.19.2 adds a bias inside of the matmul with such a weight, which gives it no gradient
    (tensor_parallel/layers.py:443). A bias of a row-parallel layer, or one that a layer returns (`skip_bias_add`), is
    added after it anyway.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear) and module.bias is not None and not module.skip_bias_add:
                module._forward_impl = partial(_biased, module._forward_impl)


def _biased(
    product: Callable[..., torch.Tensor], *, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    if bias is None or not bias.requires_grad or weight.requires_grad:
        return product(weight=weight, bias=bias, **options)
    return product(weight=weight, bias=None, **options) + bias


def _of_all_stages[Found](found: Found, stages: dist.ProcessGroup) -> list[Found]:
    if stages.size() == 1:
        return [found]
    everyone: list[Any] = [None] * stages.size()
    dist.all_gather_object(everyone, found, group=stages)
    return everyone


def _matches(
    chunks: list[torch.nn.Module], patterns: list[str], key: str, stages: dist.ProcessGroup
) -> dict[str, list[torch.nn.Parameter]]:
    named = [pair for chunk in chunks for pair in global_names(chunk).items()]
    matched = {
        pattern: [parameter for name, parameter in named if fnmatchcase(name, PARTS.get(pattern, pattern))]
        for pattern in patterns
    }
    missing = {pattern for pattern in patterns if not matched[pattern] and pattern not in PARTS}
    if any(pattern not in PARTS for pattern in patterns):
        missing = set.intersection(*_of_all_stages(missing, stages))
    if missing:
        examples = ", ".join(name for name, _ in named[:3])
        raise UserError(f"{key}: {sorted(missing)[0]!r} matches no parameter; names look like {examples}")
    return matched
