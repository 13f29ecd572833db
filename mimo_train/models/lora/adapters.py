"""The adapters of a module's chunks: add, load, freeze what is next to them, and merge."""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from mimo_train.config.errors import UserError
from mimo_train.config.parts import is_adapter
from mimo_train.models.blocks.base import EXPERT
from mimo_train.models.lora.linear import Adaptable
from mimo_train.models.parameters import global_name, global_names, seed_for
from mimo_train.models.sharding import copy_whole


def add_adapters(part: torch.nn.Module, name: str, config: TransformerConfig, seed: int) -> None:
    """Give a part of a module its adapters in `config.adapters`. The part is a transformer layer or a projector, `name`
    its name in the module."""
    for path, linear in list(part.named_modules()):
        adapted = config.adapters.get(f"{name}.{EXPERT.sub('', path)}".removesuffix("."))
        if adapted is not None:
            assert isinstance(linear, Adaptable), f"{name}.{path} cannot have adapters"
            expert = EXPERT.search(global_name(part, path))
            linear.add_adapters(adapted, config.lora, seed_for(seed, expert[0]) if expert else seed)


def quantize_linears(part: torch.nn.Module, name: str, config: TransformerConfig) -> None:
    """Quantize the linear layers of a transformer layer in `config.quantized`. Arguments as in `add_adapters`."""
    for path, layer in list(part.named_modules()):
        linear = config.quantized.get(f"{name}.{EXPERT.sub('', path)}")
        if linear is not None:
            assert isinstance(layer, Adaptable), f"{name}.{path} cannot be quantized"
            # Experts and some attentions draw their weights apart from their linear layers, whose config says no.
            layer.quantize(linear, has_values=config.perform_initialization)


def quantized_layers(module: torch.nn.Module) -> Iterator[tuple[str, Adaptable]]:
    """Yield (name, layer) of every linear layer with a quantized weight."""
    for name, layer in module.named_modules():
        if isinstance(layer, Adaptable) and layer.is_quantized:
            yield name, layer


def adapted_layers(module: torch.nn.Module) -> Iterator[tuple[str, Adaptable]]:
    """Yield (name, layer) of every linear layer with adapters."""
    for name, layer in module.named_modules():
        if isinstance(layer, Adaptable) and layer.lora is not None:
            yield name, layer


@torch.no_grad()
def load_adapters(chunks: list[torch.nn.Module], adapters: Mapping[str, torch.Tensor]) -> None:
    """Set the values of the adapters on this rank, and of parameters that were trained next to them.

    Args:
        chunks: this rank's chunks of one module.
        adapters: whole tensors by their names in the module; those of other pipeline stages are ignored. Of an
            embedding without the rows of padding.

    Raises:
        UserError: an adapter of this rank is missing or has another shape. Any rank may raise it.
    """
    for chunk in chunks:
        names = {id(parameter): name for name, parameter in global_names(chunk).items()}
        for name, parameter in global_names(chunk).items():
            if name in adapters and not is_adapter(name):
                is_cut = getattr(parameter, "tensor_model_parallel", False)
                first = len(parameter) * unwrap_model(chunk).pg_collection.tp.rank() if is_cut else 0
                rows = adapters[name][first : first + len(parameter)]
                parameter[: len(rows)] = rows.to(parameter.dtype)
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
                copy_whole(parameter, part)


def freeze_base(chunks: list[torch.nn.Module], part: str, saved: Collection[str] = ()) -> None:
    """Stop the gradients of everything but adapters and the parameters `saved`, before data-parallel wrapping. Only
    parameters that match the shell pattern `part` are frozen."""
    for chunk in chunks:
        for name, parameter in global_names(chunk).items():
            if fnmatchcase(name, part) and not is_adapter(name) and name not in saved:
                parameter.requires_grad_(False)


def start_magnitudes(module: torch.nn.Module, names: Collection[str] | None = None) -> None:
    """Set DoRA's magnitudes (`names` in the module's state dict; None: all) so that they change nothing. Call it
    whenever weights were loaded without magnitudes. Collective over the tensor-parallel ranks."""
    for path, layer in adapted_layers(module):
        adapter_names = [name for _, name, _, _ in layer.named_adapters()]
        layer.start_magnitudes(
            [name for name in adapter_names if names is None or f"{path}.{name}".removeprefix(".") in names]
        )


def merge_lora(model: list[torch.nn.Module]) -> None:
    """Merge every adapter of the model chunks into its weight (in bf16 and fp16 to the precision of a weight), and
    reset the adapters so that they change nothing. Collective over tensor-parallel ranks."""
    for chunk in model:
        for _, layer in adapted_layers(chunk):
            layer.merge()
