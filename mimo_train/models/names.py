"""Modules, layers and parameters of this rank by names that mean the same at every layout.

The only place that maps local parameters to names of the whole model: layers are counted from 0 over all stages and
chunks, experts over all expert-parallel ranks, and the last stage's copy of weights that it shares with the embedding
is named as the embedding. Patterns of `freeze`, norms of gradients and findings of a bad step use them.
"""

import re
from collections.abc import Iterator

import torch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from mimo_train.config.parts import LANGUAGE

_EXPERT_NUMBER = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\bweight)\d+$|(?<=\bbias)\d+$")
"""Where a parameter's name has the number of its expert: `local_experts.3.linear_fc1.weight`, `linear_fc1.weight3`."""

_EMBEDDING, _TIED = "embedding.word_embeddings.weight", "output_layer.weight"


def modules_of(chunks: list[MegatronModule]) -> dict[str, list[MegatronModule]]:
    """The chunks of every module that this rank holds: those of a `MimoModel`, or of the plain GPT as `language`."""
    if not isinstance(chunks[0], MimoModel):
        return {LANGUAGE: list(chunks)}
    (model,) = chunks
    modules = {name: [module] for name, module in model.modality_submodules.items()}
    if model.language_model is not None:
        modules[LANGUAGE] = [model.language_model]
    return modules


def global_names(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a model chunk, wrapped for data parallelism or not, by their names in the whole module."""
    model = unwrap_model(chunk)
    names = {_global_name(model, name): parameter for name, parameter in model.named_parameters()}
    if getattr(model, "share_embeddings_and_output_weights", False) and _TIED in names:
        names[_EMBEDDING] = names.pop(_TIED)
    return names


def tensor_names(chunk: torch.nn.Module) -> dict[int, str]:
    """The names of parameters and buffers of a model chunk in the whole module, by `id`."""
    model = unwrap_model(chunk)
    names = {id(buffer): _global_name(model, name) for name, buffer in model.named_buffers()}
    return names | {id(parameter): name for name, parameter in global_names(chunk).items()}


def layers_of(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, layer): the entries of lists of layers, and the modules outside such lists. A layer's name is the prefix
    of its parameters' names in `global_names`."""
    for key, child in module.named_children():
        if isinstance(child, TransformerLayer):
            key = child.layer_number - 1
        path = f"{name}.{key}".removeprefix(".").removeprefix("module.")
        whole = isinstance(module, torch.nn.ModuleList)
        if whole or not any(isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict)) for part in child.modules()):
            yield path, child
        else:
            yield from layers_of(child, path)


def _global_name(module: torch.nn.Module, name: str) -> str:
    parts, first_expert = name.split("."), 0
    for number, part in enumerate(parts):
        ep_group, experts = getattr(module, "ep_group", None), getattr(module, "num_local_experts", 0)
        if ep_group is not None and experts:
            first_expert = ep_group.rank() * experts
        module = getattr(module, part)
        if isinstance(module, TransformerLayer):
            parts[number] = str(module.layer_number - 1)
    return _EXPERT_NUMBER.sub(lambda found: str(int(found[0]) + first_expert), ".".join(parts))
