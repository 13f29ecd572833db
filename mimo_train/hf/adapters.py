"""Export adapters to PEFT, and find their linear layers in transformers' models."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from encoders.weight_map import Rule, Spelling, WeightMap, spelt
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE, SAVED, is_adapter
from mimo_train.config.pretrained.adapter import (
    CONFIG,
    IN_LAYERS,
    MERGE,
    PREFIX,
    adapted_paths,
    paths_of,
    saved_tensors,
    unread_layers,
)
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.transformers_llm import MODEL, TransformersLlm
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.hf.documents import Document
from mimo_train.hf.export import Stored, Weights, planned_tensors, tensors_in_our_names, tensors_of
from mimo_train.hf.fill import Reader
from mimo_train.hf.parts import ENCODER, Part, pretrained_parts
from mimo_train.hf.peft import Adapted, Place, Places, load_tensors, read_adapter
from mimo_train.hf.tensors import TensorFolder
from mimo_train.layout.adapters import WHOLE, Linear, adapted_linears, linears
from mimo_train.models.blocks.base import EXPERT
from mimo_train.models.lora.quantized import rounded
from mimo_train.models.parameters import Cut

_HEAD = SAVED["lm_head"]
"""The output layer, or the value head."""


def module_adapters(cfg: ConfigContainer, name: str, stored: Stored, document: Document | None) -> Adapted:
    """Return a module's adapters for the layers that an exported directory has; for all layers without a directory."""
    config, source = cfg.modules[name], Weights(stored, name)
    layers = linears(name, config, cfg.llm.hidden_size)
    places: dict[str, dict[str, Place]] = {}
    for part in document.parts if document is not None else ():
        if part.module == name and not part.weights.is_renamed:
            places |= places_of(part.weights, part.loaded, layers)
    if document is not None and isinstance(config.llm, TransformersLlm):
        places = _places_in_class(layers)
    adapters = {
        tensor: source.load(tensor)
        for tensor in source.tensors
        if is_adapter(tensor)
        and (document is None or any(EXPERT.sub("", tensor).startswith(f"{linear}.") for linear in places))
    }
    carried: dict[str, torch.Tensor] = {}
    for part in document.parts if document is not None and config.lora.adapter else ():
        if part.module == name and any(rule.ours.startswith(ENCODER) for rule in part.weights.rules):
            carried |= unread_tensors(config, name, part.weights, part.loaded)
    saved: dict[str, torch.Tensor] = {}
    for part in document.parts if document is not None else ():
        rules = tuple(rule for rule in part.weights.rules if rule.ours in _saved_parameters(cfg, name))
        if part.module == name and rules:
            table = replace(part, weights=replace(part.weights, rules=rules).under(part.loaded))
            dtype = source.tensors[rules[0].ours].dtype
            planned = planned_tensors(table, source.tensors, dtype)
            values = zip(planned, tensors_of(table, source, dtype), strict=True)
            saved |= {f"{PREFIX}{tensor.name}": value for tensor, value in values}
    is_tied = name == LANGUAGE and not cfg.traits.value_head and cfg.llm.tie_embeddings
    return Adapted(adapters, config.lora, layers, places, carried, name, saved, is_tied)


def _saved_parameters(cfg: ConfigContainer, name: str) -> set[str]:
    """Return the names of the parameters that are trained whole next to a module's adapters."""
    saved = {SAVED[each] for each in cfg.modules[name].lora.modules_to_save}
    return saved | ({_HEAD} if name == LANGUAGE and cfg.traits.value_head else set())


def is_base(cfg: ConfigContainer, document: Document, stored: Stored) -> bool:
    """True if the weights that adapters were trained on equal those of their source directory. Adapters have what was
    trained next to them."""
    if document.source is None:
        return False
    for part in document.sources:
        drawn = {_HEAD} if part.module == LANGUAGE and cfg.traits.value_head else set()
        written, weights = (
            replace(each, rules=tuple(rule for rule in each.rules if rule.ours not in drawn))
            for each in (part.written, part.weights)
        )
        if written != weights:
            return False  # it has rows that the directory lacks
    for module in document.whole:
        folder, source = TensorFolder(document.source, "pretrained"), Weights(stored, module.module)
        for planned, load in tensors_in_our_names(module, source):
            if planned.name not in folder.tensors or not torch.equal(load(), folder.whole(planned.name)):
                return False
    for part in document.sources:
        folder, source = TensorFolder(part.folder, part.key), Weights(stored, part.module)
        reader = Reader(folder, part.weights, part.key)
        saved = _saved_parameters(cfg, part.module) if cfg.modules[part.module].lora.rank else set()
        for rule in part.weights.rules:
            if rule.ours in saved:
                continue
            trained = source.load(rule.ours)
            is_quantized = source.is_quantized(rule.ours)
            base = torch.empty_like(trained, dtype=torch.float32 if is_quantized else None)
            reader.fill({rule.ours: base}, {rule.ours: Cut()})
            base = rounded(base).to(trained.dtype) if is_quantized else base
            if not torch.equal(trained, base):
                return False
    return True


def places_of(weights: WeightMap, spelling: Spelling, layers: list[Linear]) -> dict[str, dict[str, Place]]:
    """Return where a `transformers` model has linear layers, by its names in memory.

    Args:
        spelling: spelling of names in memory.
    """
    rules, places = {rule.ours: rule for rule in weights.rules}, {}
    for linear in layers:
        rule = rules.get(f"{linear.of_expert(0)}.weight")
        if rule is None:
            continue
        names = list(dict.fromkeys(rows.name for rows in rule.rows if rows.name))
        paths = [spelt(name, spelling).removesuffix(".weight") for name in names]
        if linear.experts:
            # In memory, version 5 of transformers has the weights of all experts in one tensor with this name.
            experts = re.sub(r"\w+\.experts\..*", "mlp.experts", paths[0])
            order = _rows_in_their_order(rule, names[0]) if len(names) == 1 else ()
            places[linear.name] = {WHOLE: Place(f"{experts}.{linear.projections[0][0]}", order)}
        elif len(names) == len(linear.projections):
            rows = [_rows_in_their_order(rule, name) for name in names]
            projections = (projection for projection, _ in linear.projections)
            places[linear.name] = dict(zip(projections, map(Place, paths, rows), strict=True))
        elif len(names) == 1:
            places[linear.name] = {WHOLE: Place(paths[0], _rows_in_their_order(rule, names[0]))}
    return places


def _places_in_class(layers: list[Linear]) -> dict[str, dict[str, Place]]:
    """Return the places of the linear layers of a class of transformers."""
    return {
        linear.name: {name: Place(linear.name.removeprefix(MODEL))}
        for linear in layers
        for name, _ in linear.projections
    }


def _rows_in_their_order(rule: Rule, name: str) -> tuple[int, ...]:
    """Return the indices of our rows from one tensor in the order of this tensor; empty if it is ours."""
    theirs = [rows.first + row * rows.step for rows in rule.rows if rows.name == name for row in range(rows.count)]
    order = sorted(range(len(theirs)), key=theirs.__getitem__)
    return () if order == list(range(len(theirs))) else tuple(order)


@dataclass(frozen=True)
class ModulePlaces:
    """The linear layers of a module that starts with an adapter."""

    linears: list[Linear]
    places: Places
    """Places by the adapter's names."""
    unread: frozenset[str] = frozenset()
    """Adapter layers after the encoder's last layer that is read."""

    @property
    def paths(self) -> set[str]:
        """Return the adapter's names of the layers."""
        return {place.path for places in self.places.values() for place in places.values()} | self.unread


def start_places(cfg: ConfigContainer, rows: int) -> dict[str, ModulePlaces]:
    """Return the linear layers of every module that starts with an adapter.

    Args:
        rows: rows of the language model's embedding, with padding.

    Raises:
        UserError: an adapter cannot be read.
    """
    parts, modules = pretrained_parts(cfg, rows), {}
    for name, module in cfg.modules.items():
        if module.lora.adapter:
            layers = linears(name, module, cfg.llm.hidden_size)
            paths = set(adapted_paths(Path(module.lora.adapter)))
            places: dict[str, dict[str, Place]] = {}
            for part in parts:
                if part.module == name:
                    places |= _as_spelt(part, layers, paths)
            if isinstance(module.llm, TransformersLlm):
                places = _places_in_class(layers)
            modules[name] = ModulePlaces(layers, places, _unread(module, name, paths))
    return modules


def start_adapter(
    cfg: ConfigContainer, name: str, folder: Path, places: ModulePlaces, others: Collection[str]
) -> Mapping[str, torch.Tensor]:
    """Return whole tensors of a module's start adapter, by their names in the module.

    Args:
        others: layers of the adapter that belong to other modules, which start with it too.

    Raises:
        UserError: it belongs to another model, or to layers without adapters in this run.
    """
    key = f"modules.{name}.lora.adapter"
    paths = adapted_paths(folder)
    apart = sorted({*paths} - {*paths_of(paths, name), *others})
    if apart:
        other = LANGUAGE if name != LANGUAGE else "its encoder"
        raise UserError(
            f"{key}: {folder} has an adapter of {apart[0]} too, which is not of {name}: start {other} with it too, by "
            "its lora.adapter"
        )
    try:
        _, adapters = read_adapter(folder, places.linears, places.places, {*others, *places.unread})
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    adapted = adapted_linears(name, cfg.modules[name], cfg.llm.hidden_size).values()
    built = {
        ".".join(filter(None, (item.linear.name, projection))) for item in adapted for projection in item.projections
    }
    read = {EXPERT.sub("", tensor).rpartition(".")[0] for tensor in adapters}
    if built != read:
        first = sorted(built ^ read)[0]
        where = "the adapter has it" if first in read else "the run has it"
        raise UserError(
            f"{key}: the adapters of the run and those in {folder} differ in {first}, {where} alone: remove "
            "lora.targets"
        )
    return adapters | _saved_values(cfg, name, folder)


def _saved_values(cfg: ConfigContainer, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return what was trained next to the adapter of the language model, by names in the module."""
    names = saved_tensors(folder) if name == LANGUAGE else {}
    if not names:
        return {}
    key, tensors = f"modules.{name}.lora.adapter", load_tensors(folder)
    if "score" in names and not cfg.traits.value_head:
        raise UserError(f"{key}: {folder} has a value head. Set train.task=reward, or choose another adapter")
    if cfg.traits.value_head and "lm_head" in names:
        raise UserError(
            f"{key}: {folder} has an output layer, and train.task={cfg.train.task} has a value head: {MERGE}"
        )
    config = json.loads((folder / CONFIG).read_text())
    is_tied = not cfg.traits.value_head and cfg.llm.tie_embeddings
    if is_tied and not config.get("ensure_weight_tying"):
        text = "has trained embeddings without the output layer (ensure_weight_tying is false), and they are tied here"
        raise UserError(f"{key}: {folder} {text}: {MERGE}")
    ours = {**SAVED, "score": _HEAD}
    values = {ours[each]: tensors[tensor] for each, tensor in names.items()}
    most = embedding_rows(cfg.llm, 0) if cfg.llm.vocab_size else 0
    for parameter, value in values.items():
        if value.size(-1) != cfg.llm.hidden_size or most and len(value) > most:
            raise UserError(f"{key}: {parameter} has shape {tuple(value.shape)} in {folder}, which fits another model")
    return values


def _unread(module: ModuleConfig, name: str, paths: Collection[str]) -> frozenset[str]:
    """Return the adapter's layers after the encoder's last layer that is read."""
    if module.encoder is None:
        return frozenset()
    return frozenset(unread_layers(paths, name, module.encoder.num_layers, module.encoder.built_layers))


def unread_tensors(module: ModuleConfig, name: str, weights: WeightMap, loaded: Spelling) -> dict[str, torch.Tensor]:
    """Return the start adapter's tensors for layers that are not read, by their export names.

    Args:
        weights: weight map of the encoder.
        loaded: spelling of names in memory.

    Raises:
        UserError: the adapter cannot be read.
    """
    folder = Path(module.lora.adapter)
    unread = _unread(module, name, adapted_paths(folder))
    named = {rows.name.removesuffix(".weight") for rule in weights.rules for rows in rule.rows if rows.name}
    tensors = {}
    for key, value in load_tensors(folder).items() if unread else ():
        path, _, kind = key.removeprefix(PREFIX).partition(".lora_")
        if path not in unread:
            continue
        first = IN_LAYERS.sub(lambda match: match[0].replace(match[1], "0"), path)
        fitting = max((suffix for suffix in named if f".{first}".endswith(f".{suffix}")), key=len, default="")
        if not fitting:
            raise UserError(f"{folder}: {path} is no layer that can have adapters here: {MERGE}")
        ending = path[len(first) - len(fitting) :]
        tensors[f"{PREFIX}{spelt(ending, loaded)}.lora_{kind}"] = value
    return tensors


def _as_spelt(part: Part, layers: list[Linear], paths: Collection[str]) -> dict[str, dict[str, Place]]:
    """Return a part's places in the spelling that matches most adapter names: `transformers` versions differ."""
    choices = [places_of(part.weights, spelling, layers) for spelling in part.weights.prefixes]
    return max(
        choices,
        key=lambda choice: sum(place.path in paths for of_layer in choice.values() for place in of_layer.values()),
    )
