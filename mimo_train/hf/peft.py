"""Read and write PEFT adapters: `adapter_config.json` and `adapter_model.safetensors` (checked with peft 0.21.2).

PEFT has an adapter per linear layer of a Hugging Face model, while ours fuse several. Both directions are exact. An
adapter of a whole fused layer becomes one per projection, with the same A and that projection's rows of B and of the
magnitudes. PEFT's adapters become ours per projection. If their layer is fused too, with another row order, its adapter
becomes ours of the whole layer with reordered rows.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from encoders.key_rules import nearest
from mimo_train.config.errors import UserError
from mimo_train.config.parts import ADAPTERS
from mimo_train.config.pretrained.adapter import (
    CONFIG,
    PREFIX,
    TENSOR,
    WEIGHTS,
    adapted_paths,
    adapter_paths,
    is_stack,
    read_config,
    stored_names,
    weights_file,
)
from mimo_train.config.schema_modules import LoraConfig
from mimo_train.layout.adapters import WHOLE, Linear
from mimo_train.models.lora.rows import FusedRows


@dataclass(frozen=True)
class Place:
    """Where PEFT has one of our linear layers, or one of its projections."""

    path: str
    """Path of the module in the Hugging Face model, such as `model.layers.0.self_attn.q_proj`."""
    rows: tuple[int, ...] = ()
    """Our row indices in their order; empty if the order is equal."""

    def theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with rows reordered from ours to theirs."""
        return tensor[list(self.rows)] if self.rows else tensor

    def ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with rows reordered from theirs to ours."""
        return tensor[torch.tensor(self.rows).argsort()] if self.rows else tensor


Places = Mapping[str, Mapping[str, Place]]
"""Linear layer's name in its module -> projection (`Linear.projections`), or WHOLE if fused there -> place."""

_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}


@dataclass(frozen=True)
class Adapted:
    """The adapters of one module."""

    adapters: Mapping[str, torch.Tensor]
    """Whole tensors by their names in the module."""
    lora: LoraConfig
    linears: Sequence[Linear]
    """Linear layers of the module (`layout.adapters.linears`)."""
    places: Places
    carried: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors by PEFT's names, written unchanged."""
    module: str = ""
    saved: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of modules that were trained whole, by PEFT's names."""
    is_tied: bool = False
    """True if the output layer is tied to the embedding."""


def write_adapters(
    folder: Path, modules: Sequence[Adapted], *, base_model: str = "", revision: str = "", task_type: str
) -> None:
    """Write the adapters of modules that form one Hugging Face model into `folder`. Rank and alpha may differ.

    Args:
        base_model: folder or name of the adapters' base model.
        revision: hub revision of `base_model`; empty for any.

    Raises:
        UserError: a layer with adapters has no place in the Hugging Face model, or the modules differ in a setting that
            PEFT has once per adapter.
    """
    tensors: dict[str, torch.Tensor] = {}
    ranks, alphas = {}, {}
    first = modules[0].lora
    for adapted in modules:
        for name in ("dropout", "rslora", "dora"):
            if getattr(adapted.lora, name) != getattr(first, name):
                raise UserError(
                    f"lora.{name} is {getattr(first, name)} of one module and {getattr(adapted.lora, name)} of "
                    "another: an adapter of PEFT has one for the whole model: make them equal, or give --merge"
                )
        of_module = {**_tensors_of(adapted), **adapted.carried}
        tensors |= of_module
        for path in {key.removeprefix(PREFIX).partition(".lora_")[0] for key in of_module}:
            if adapted.lora.rank != first.rank:
                ranks[re.escape(path)] = adapted.lora.rank
            if adapted.lora.alpha != first.alpha:
                alphas[re.escape(path)] = _number(adapted.lora.alpha)
    saved = {name: value for adapted in modules for name, value in adapted.saved.items()}
    paths = sorted({key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors})
    stacks, names = [path for path in paths if is_stack(path)], stored_names(paths)
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model or None,
        "revision": revision or None,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": _number(first.alpha),
        "lora_dropout": first.dropout,
        # Use whole paths: the last parts may also name layers without adapters, in a vision tower for example.
        "target_modules": [path for path in paths if path not in stacks] or None,
        "target_parameters": stacks or None,
        "rank_pattern": dict(sorted(ranks.items())),
        "alpha_pattern": dict(sorted(alphas.items())),
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": sorted(name.split(".")[-2] for name in saved) or None,
    }
    if any(adapted.is_tied and adapted.saved for adapted in modules):
        config["ensure_weight_tying"] = True  # else the loaded output layer keeps the weights of the base model
    folder.mkdir(parents=True, exist_ok=True)
    # Write here, so that failures are OSErrors; safetensors raises its own.
    stored = dict(saved)
    for key, value in tensors.items():
        path = key.removeprefix(PREFIX).partition(".lora_")[0]
        stored[key.replace(path, names[path])] = value.clone()
    (folder / WEIGHTS).write_bytes(save(stored, {"format": "pt"}))
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _tensors_of(module: Adapted) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for linear in module.linears:
        places = module.places.get(linear.name, {})
        if linear.experts and f"{linear.of_expert(0)}.lora_a" not in module.adapters:
            continue
        for projection, adapter in _by_projection(linear, module.adapters, is_split=WHOLE not in places).items():
            place = places.get(projection)
            if place is None:
                last = linear.name.rpartition(".")[2]
                instead = f"name {last} in lora.targets instead" if places else "leave it out of lora.targets"
                raise UserError(
                    f"{linear.name} has an adapter of {projection}, and the Hugging Face model has no layer for it: "
                    f"{instead}"
                )
            for name, tensor in adapter.items():
                tensors[f"{PREFIX}{place.path}.{_NAMES[name]}"] = tensor if name == "lora_a" else place.theirs(tensor)
    return tensors


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def read_adapter(
    folder: Path, linears: Sequence[Linear], places: Places, others: Collection[str] = ()
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return the adapter in `folder`: a module's LoRA config, and whole tensors by their names in the module.

    The tensors suit `lora.load_adapters`. See `Adapted` for arguments.

    Args:
        others: layers of the Hugging Face model to skip, because they belong to other modules.

    Raises:
        UserError: files are missing or unreadable, a tensor has no layer in this module or another shape, or the
            adapter uses an unsupported feature; by name.
    """
    read_config(folder, ())  # reports config errors before tensors are read
    tensors = {path: parts for path, parts in _read_tensors(folder).items() if path not in others}
    lora = read_config(folder, tensors)
    of_path = {
        place.path: (linear, name, place) for linear in linears for name, place in places.get(linear.name, {}).items()
    }
    adapters, targets = {}, set()
    for path, parts in tensors.items():
        if path not in of_path:
            raise UserError(
                f"{folder / WEIGHTS}: {path} is no layer that can have adapters here. {nearest(path, of_path)}"
            )
        linear, projection, place = of_path[path]
        key = projection if linear.fused else WHOLE
        shapes = _shapes(linear, projection, lora)
        if parts.keys() != shapes.keys():
            what = " and ".join(_NAMES[name] for name in sorted(parts.keys() ^ shapes.keys()))
            kind = "is missing" if parts.keys() < shapes.keys() else "does not belong there"
            raise UserError(f"{folder / WEIGHTS}: {path}: {what} {kind}, with use_dora {str(lora.dora).lower()}")
        for name, tensor in parts.items():
            if tuple(tensor.shape) != shapes[name]:
                raise UserError(
                    f"{folder / WEIGHTS}: {path}.{_NAMES[name]} has shape {tuple(tensor.shape)}, and {linear.name} "
                    f"needs {shapes[name]} for it"
                )
            tensor = tensor if name == "lora_a" else place.ours(tensor)
            if not linear.experts:
                adapters[".".join(filter(None, (linear.name, key, name)))] = tensor
                continue
            sizes = (linear.experts, lora.rank)
            experts = tensor.unflatten(0, sizes) if name == "lora_a" else tensor.unflatten(1, sizes[::-1]).movedim(2, 0)
            adapters |= {f"{linear.of_expert(number)}.{name}": values for number, values in enumerate(experts)}
        targets.add((linear.name, key))
    lora.targets = _targets(linears, targets)
    return lora, adapters


def _by_projection(
    linear: Linear, adapters: Mapping[str, torch.Tensor], is_split: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Return a linear layer's adapters by projection; with `is_split` a whole-layer adapter is split."""
    if linear.experts:
        experts = [linear.of_expert(number) for number in range(linear.experts)]
        lora_a = torch.cat([adapters[f"{expert}.lora_a"] for expert in experts])
        lora_b = torch.stack([adapters[f"{expert}.lora_b"] for expert in experts], dim=-1).flatten(1)
        return {WHOLE: {"lora_a": lora_a, "lora_b": lora_b}}
    names = [name for name, _ in linear.projections]
    by_path = {}
    for projection in (WHOLE, *names):
        prefix = ".".join(filter(None, (linear.name, projection)))
        parts_of_layer = {name: adapters[f"{prefix}.{name}"] for name in ADAPTERS if f"{prefix}.{name}" in adapters}
        if not parts_of_layer:
            continue
        if projection != WHOLE or not is_split:
            by_path[projection] = parts_of_layer
            continue
        rows = FusedRows(linear)
        parts = {name: rows.split(parts_of_layer[name], names) for name in parts_of_layer if name != "lora_a"}
        by_path |= {
            path: {"lora_a": parts_of_layer["lora_a"], **{name: parts[name][path] for name in parts}} for path in names
        }
    return by_path


def _shapes(linear: Linear, projection: str, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter in PEFT's file. Experts are packed: A [experts, rank] x inputs, and B rows x
    [rank, experts] (peft 0.21.2, `ParamWrapper`)."""
    rows, rank = linear.rows(projection), lora.rank * max(1, linear.experts)
    shapes: dict[str, tuple[int, ...]] = {"lora_a": (rank, linear.inputs), "lora_b": (rows, rank)}
    return shapes | ({"lora_magnitude": (rows,)} if lora.dora else {})


def _read_tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    names = {theirs: ours for ours, theirs in _NAMES.items()}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    stored = load_tensors(folder)
    paths = adapter_paths(folder, stored)
    for key, tensor in stored.items():
        match = TENSOR.fullmatch(key)
        if match is None:
            continue  # trained next to the adapters
        tensors.setdefault(paths[match[1]], {})[names[match[2]]] = tensor
    return tensors


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by PEFT's names. Raises UserError if they cannot be read."""
    adapted_paths(folder)  # reports what is wrong with the file
    file = weights_file(folder)
    try:
        is_safe = file.name == WEIGHTS
        return load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def _targets(linears: Sequence[Linear], adapted: set[tuple[str, str]]) -> list[str]:
    """Return `lora.targets` for exactly these (layer, projection): last parts of names if they suffice."""
    paths = {
        (linear.name, projection): name
        for linear in linears
        for name, projection in linear.names().items()
        if not (projection == WHOLE and name != linear.name)
    }
    last = {key: path.rpartition(".")[2] for key, path in paths.items()}
    short = {last[key] for key in adapted}
    in_layers = {linear.name for linear in linears if linear.layer is not None and "experts." not in linear.name}
    if all(name in in_layers for name, _ in adapted) and adapted == {
        key for key in paths if last[key] in short and key[0] in in_layers
    }:
        return sorted(short)
    return sorted(paths[key] for key in adapted)
