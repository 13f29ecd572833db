"""The settings of every parameter: optimizer, rates, weight decay, step of release."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ParamKey, ParamPredicate
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_optim import OptimConfig
from mimo_train.models.freeze import matching_parameters
from mimo_train.models.parameters import global_names, mark
from mimo_train.optim.group_optimizer import ALGORITHM, EMA, MOMENTS, MOMENTUM
from mimo_train.optim.module_optimizer import RELEASE
from mimo_train.optim.moments import OFFLOAD
from mimo_train.optim.schedules import rates_of

SETTINGS = "optimizer_settings"
"""Key of a parameter group, and attribute of its parameters: the settings that differ from the module's, as text."""

_OUTPUTS = ("output_layer", "lm_head", "score")
"""Names of layers of logits and scores."""


def group_overrides(
    cfg: ConfigContainer,
    name: str,
    chunks: list[torch.nn.Module],
    stages: dist.ProcessGroup,
    releases: dict[torch.nn.Parameter, int],
) -> dict[ParamKey, Any]:
    """Return the settings of parameter groups: the optimizer, no decay of vectors, rates of the projector and of
    `groups`, the release step. Equal parameters have equal settings on every rank, although each rank has only its own.
    Collective over `stages`. Raises UserError if an entry of `groups` matches no parameter
    that is trained."""
    optim, named = cfg.modules[name].optim, [pair for chunk in chunks for pair in global_names(chunk).items()]
    of_module = cfg.optim_of(name)
    matrices = _hidden_matrices(chunks, has_logits=name == LANGUAGE) if of_module.name == "muon" else set()
    settings: dict[torch.nn.Parameter, dict[str, Any]] = {parameter: {} for _, parameter in named}
    for parameter_name, parameter in named:
        settings[parameter] |= _algorithm(of_module, id(parameter) in matrices)
        if parameter.dim() == 1 or parameter_name.endswith(".bias"):
            settings[parameter]["wd_mult"] = 0.0
        if optim.projector_lr is not None and fnmatchcase(parameter_name, PARTS["projector"]):
            settings[parameter]["max_lr"] = optim.projector_lr
        if parameter in releases:
            settings[parameter][RELEASE] = releases[parameter]
    key = f"modules.{name}.optim.groups"
    patterns = matching_parameters(chunks, list(optim.groups), key, stages, only_trained=True)
    for pattern, parameters in patterns.items():
        group = optim.groups[pattern]
        values: dict[str, Any] = rates_of(group)
        if group.weight_decay is not None:
            values |= {"wd_mult": 1.0, "start_wd": group.weight_decay, "end_wd": group.weight_decay}
        for parameter in parameters:
            settings[parameter] |= values
    overrides = {}
    for parameter, values in settings.items():
        if not values:
            continue
        text = repr(sorted(values.items()))
        mark(parameter, **{SETTINGS: text})
        predicate = ParamPredicate(text, lambda parameter, text=text: getattr(parameter, SETTINGS, "") == text)
        overrides[ParamKey(predicate=predicate)] = {**values, SETTINGS: text}
    return dict(sorted(overrides.items(), key=lambda item: item[1][SETTINGS]))


def _algorithm(optim: OptimConfig, is_matrix: bool) -> dict[str, Any]:
    """Return the optimizer of a parameter, the precision of its moments, the decay rate of its average and the place of
    its states, where they are not AdamW, fp32, 0 and the device."""
    settings: dict[str, Any] = {}
    if optim.name == "muon" and is_matrix:
        settings = {ALGORITHM: "muon", MOMENTUM: optim.momentum}
    elif optim.name in ("lion", "adafactor"):
        settings = {ALGORITHM: optim.name}
    if optim.moments != "fp32" and optim.name != "adafactor":
        settings[MOMENTS] = optim.moments
    if optim.offloads:
        settings[OFFLOAD] = True
    if optim.ema:
        settings[EMA] = optim.ema
    return settings


def _hidden_matrices(chunks: Iterable[torch.nn.Module], *, has_logits: bool) -> set[int]:
    """Return the ids of the weights of linear layers, without embeddings and output layers, which Muon leaves to AdamW.
    Matrices of adapters count, stacks of matrices in one parameter do not."""
    matrices = set[int]()
    for chunk in chunks:
        # Classes of transformers have other names for their output layer.
        classes: list[Any] = [part for part in chunk.modules() if hasattr(part, "get_output_embeddings")]
        # Media halves have none, and some raise an error for it.
        outputs = [each.get_output_embeddings() for each in classes] if has_logits else []
        for name, module in chunk.named_modules():
            if isinstance(module, torch.nn.Embedding | VocabParallelEmbedding) or name.split(".")[-1] in _OUTPUTS:
                continue
            if any(module is output for output in outputs):
                continue
            for parameter_name, parameter in module.named_parameters(recurse=False):
                is_weight = parameter_name.startswith("weight") or parameter_name in ("lora_a", "lora_b")
                if is_weight and parameter.dim() == 2:
                    matrices.add(id(parameter))
    return matrices
