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
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import unwrap_model

from mimo_train.config.errors import UserError
from mimo_train.config.parts import PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.ranks import RunLayout
from mimo_train.models.parameters import global_names
from mimo_train.parallel.bridge.shapes import Needs, StepShapes
from mimo_train.parallel.groups import RunGroups


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
    for parameters in matching_parameters(chunks, patterns, key, stages).values():
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
    for pattern, parameters in matching_parameters(chunks, list(until), key, stages).items():
        for parameter in parameters:
            if parameter.requires_grad and until[pattern] > 0:
                steps[parameter] = max(until[pattern], steps.get(parameter, 0))
    _require_learning_biases(chunks, steps, key, stages)
    return steps


class FreezeStages:
    """Freezes parameters until their step (`modules.NAME.freeze_until`). Until then they require no gradient, and the
    optimizer does not change them. The learning rate follows the run's steps: a part that is released late starts at
    the rate of that step, without its own warm-up."""

    def __init__(
        self,
        cfg: ConfigContainer,
        releases: dict[torch.nn.Parameter, int],
        release: Callable[[int], None],
        shapes: StepShapes | None = None,
        needs: "GradientNeeds | None" = None,
    ):
        """Freeze the parameters that the first step does not train. `apply` releases them, also in a resumed run.

        Args:
            releases: see `release_steps`.
            release: called with a step of `freeze_until` when it is reached; `ModuleOptimizer.release`.
            shapes: gets the gradient `needs` of every step.
        """
        self._release, self._shapes, self._needs = release, shapes, needs
        self._steps = sorted({step for module in cfg.modules.values() for step in module.freeze_until.values()} - {0})
        self._waiting: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, step in releases.items():
            parameter.requires_grad_(False)
            self._waiting.setdefault(step, []).append(parameter)

    def apply(self, step: int) -> None:
        """Release the parameters that are trained from `step` on. Called at the start of every step, after loading.
        `step` counts those of earlier jobs too."""
        while self._steps and self._steps[0] <= step:
            released = self._steps.pop(0)
            for parameter in self._waiting.pop(released, []):
                parameter.requires_grad_(True)
            self._release(released)
        if self._shapes is not None and self._needs is not None:
            self._shapes.needs = self._needs.at(step)


class GradientNeeds:
    """The step from which each stage of each source module needs gradients; the same on every rank."""

    def __init__(
        self,
        layout: RunLayout,
        modules: dict[str, list[MegatronModule]],
        releases: dict[torch.nn.Parameter, int],
        groups: RunGroups,
    ):
        """Find the needs of all stages. Collective over all ranks, before `FreezeStages` freezes anything.

        Args:
            modules: the chunks of the modules of this rank.
            releases: the step from which a parameter is trained, if it is frozen at first.
        """
        local: dict[tuple[str, int, bool], int] = {}
        sources = {edge.source for edge in layout.edges}
        for name, chunks in modules.items():
            for chunk in chunks if name in sources else ():
                for parameter_name, parameter in unwrap_model(chunk).named_parameters():
                    if parameter.requires_grad:
                        place = name, groups.collections[name].pp.rank(), parameter_name.startswith("encoders.")
                        step = releases.get(parameter, 0)
                        local[place] = min(step, local.get(place, step))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, local)
        self._first_steps: dict[tuple[str, int, bool], int] = {}
        for first_steps in everyone:
            for place, step in first_steps.items():
                self._first_steps[place] = min(step, self._first_steps.get(place, step))
        self._stages = {name: layout.modules[name].pp for name in layout.modules if name in sources}

    def at(self, step: int) -> dict[str, Needs]:
        """Return the gradient needs of each source after `step` steps."""
        trained = {place for place, first in self._first_steps.items() if first <= step}
        return {
            name: Needs(
                stages=tuple(
                    any((name, before, True) in trained for before in range(stage + 1)) for stage in range(stages)
                ),
                features=any(place[0] == name for place in trained),
            )
            for name, stages in self._stages.items()
        }


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
    for weight, bias in chain(*_of_all_stages(wrong, stages)):
        raise UserError(
            f"{key}: {weight} is frozen for longer than {bias}, to which Transformer Engine gives a gradient "
            f"only together with it: freeze {bias} for as long, or leave {weight} out"
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


def _of_all_stages[Value](value: Value, stages: dist.ProcessGroup) -> list[Value]:
    if stages.size() == 1:
        return [value]
    everyone: list[Any] = [None] * stages.size()
    dist.all_gather_object(everyone, value, group=stages)
    return everyone


def matching_parameters(
    chunks: list[torch.nn.Module],
    patterns: list[str],
    key: str,
    stages: dist.ProcessGroup,
    *,
    only_trained: bool = False,
) -> dict[str, list[torch.nn.Parameter]]:
    """Return this rank's parameters by matching pattern, without frozen ones if `only_trained`. Arguments and errors
    are as in `freeze`. Collective over `stages`."""
    named = [pair for chunk in chunks for pair in global_names(chunk).items()]
    if only_trained:
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    matched = {
        pattern: [parameter for name, parameter in named if fnmatchcase(name, PARTS.get(pattern, pattern))]
        for pattern in patterns
    }
    missing = {pattern for pattern in patterns if not matched[pattern] and pattern not in PARTS}
    if any(pattern not in PARTS for pattern in patterns):
        missing = set.intersection(*_of_all_stages(missing, stages))
    if missing:
        examples = ", ".join(name for name, _ in named[:3])
        kind = "parameter that is trained" if only_trained else "parameter"
        raise UserError(f"{key}: {sorted(missing)[0]!r} matches no {kind}; names look like {examples}")
    return matched
