"""Adapters of a whole module: create, load, merge, and freeze the other weights."""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.errors import UserError
from mimo_train.config.parts import is_adapter
from mimo_train.models.lora.linear import Adaptable
from mimo_train.models.parameters import global_names


def add_adapters(part: torch.nn.Module, name: str, config: TransformerConfig, seed: int) -> None:
    """Give a part of a module its adapters in `config.adapters`. The part is a transformer layer or a projector, `name`
    its name in the module."""
    for path, linear in list(part.named_modules()):
        adapted = config.adapters.get(f"{name}.{path}".removesuffix("."))
        if adapted is not None:
            assert isinstance(linear, Adaptable), f"{name}.{path} cannot have adapters"
            linear.add_adapters(adapted, config.lora, seed)


def adapted_layers(module: torch.nn.Module) -> Iterator[tuple[str, Adaptable]]:
    """Yield (name, layer) of every linear layer with adapters."""
    for name, layer in module.named_modules():
        if isinstance(layer, Adaptable) and layer.lora is not None:
            yield name, layer


def whole_adapters(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters of a module that one process holds whole, by their names in the module."""
    found = {}
    for name, parameter in global_names(chunk).items():
        if is_adapter(name):
            found[name] = parameter.detach()
    assert all(layer.tp_group.size() == 1 for _, layer in adapted_layers(chunk)), "adapters are cut"
    return found


@torch.no_grad()
def load_adapters(chunks: list[torch.nn.Module], adapters: Mapping[str, torch.Tensor]) -> None:
    """Set the values of the adapters on this rank.

    Args:
        chunks: this rank's chunks of one module.
        adapters: whole tensors by their names in the module; those of other pipeline stages are ignored.

    Raises:
        UserError: an adapter of this rank is missing or has another shape. Any rank may raise it.
    """
    for chunk in chunks:
        names = {id(parameter): name for name, parameter in global_names(chunk).items()}
        for _, layer in adapted_layers(chunk):
            for projection, _, parameter, dim in layer.named_adapters():
                name = names[id(parameter)]
                if name not in adapters:
                    raise UserError(f"there is no {name} among the adapters to load: lora.targets name other layers")
                part = layer.own_part(adapters[name], projection, dim)
                if part.shape != parameter.shape:
                    raise UserError(
                        f"{name} has shape {tuple(adapters[name].shape)} among the adapters to load, and its part here "
                        f"{tuple(part.shape)}, not {tuple(parameter.shape)}"
                    )
                parameter.copy_(part)


def freeze_base(chunks: list[torch.nn.Module], part: str) -> None:
    """Stop the gradients of everything but adapters, before data-parallel wrapping. Only parameters that match the
    shell pattern `part` are frozen."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if fnmatchcase(name, part) and not is_adapter(name):
                parameter.requires_grad_(False)


def start_magnitudes(module: torch.nn.Module, names: Collection[str] | None = None) -> None:
    """Set DoRA's magnitudes (`names` in the module's state dict; None: all) so that they change nothing. Call it
    whenever weights were loaded without magnitudes. Collective over the tensor-parallel ranks."""
    for path, layer in adapted_layers(module):
        own = [name for _, name, _, _ in layer.named_adapters()]
        layer.start_magnitudes([name for name in own if names is None or f"{path}.{name}".removeprefix(".") in names])


def merge_lora(model: list[torch.nn.Module]) -> None:
    """Merge every adapter of the model chunks into its weight (in bf16 and fp16 to the precision of a weight), and
    reset the adapters so that they change nothing. Collective over tensor-parallel ranks."""
    for chunk in model:
        for _, layer in adapted_layers(chunk):
            layer.merge()
