"""Load `modules.NAME.pretrained` weights into the model of a new run; each rank reads its own shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from encoders.weight_map import WeightMap
from mimo_train.config.parts import LANGUAGE, is_adapter
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.transformers_llm import TransformersLlm, TransformersSizes, tensors_of_class
from mimo_train.hf.adapters import start_adapter, start_places
from mimo_train.hf.fill import Reader
from mimo_train.hf.matching import require_no_others
from mimo_train.hf.parts import pretrained_parts
from mimo_train.hf.tensors import TensorFolder
from mimo_train.models.lora.adapters import load_adapters, quantized_layers, start_magnitudes
from mimo_train.models.lora.quantized import quantize
from mimo_train.models.parameters import Cut, global_name, global_names, modules_of, router_biases
from mimo_train.models.sharding import ShardedModule, shard_of
from mimo_train.parallel.collectives import agreed
from mimo_train.parallel.groups import RunGroups


def load_pretrained(cfg: ConfigContainer, model: list[MegatronModule], groups: RunGroups, rows: int) -> bool:
    """Fill this rank's parameters from their modules' directories; adapters keep their initial values. Collective.

    Args:
        rows: rows of the language model's embedding, with padding.

    Returns:
        True if any module has a directory.

    Raises:
        UserError: a directory does not fit the model; on every rank.
    """
    chunks_of = modules_of(model)
    with agreed():
        parts = pretrained_parts(cfg, rows)
        as_is = cfg.language.pretrained if isinstance(cfg.language.llm, TransformersLlm) else ""
        for chunk in chunks_of.get(LANGUAGE, ()) if as_is else ():
            if not (isinstance(chunk, ShardedModule) and _reads_rows(cfg, chunk)):
                unwrap_model(chunk).load_weights(as_is, f"modules.{LANGUAGE}.pretrained")
        folders = {part.folder: TensorFolder(part.folder, part.key) for part in parts}
        readers = [(part, Reader(folders[part.folder], part.weights, part.key, cfg.run.seed)) for part in parts]
        for part, reader in readers:
            if part.module in chunks_of:
                local = {
                    name: (*shard_of(value), value) for name, value in _parameters(chunks_of[part.module], part.begins)
                }
                cuts = {name: rows or _cut(value, groups, part.module) for name, (_, rows, value) in local.items()}
                quantized = _quantized(chunks_of[part.module], part.begins)
                plain = {name: shard for name, (shard, *_) in local.items() if shard.numel() and name not in quantized}
                reader.fill(plain, cuts)
                for name, layer in quantized.items():
                    full = torch.empty_like(layer.full_weight(torch.float32))
                    reader.fill({name: full}, cuts)
                    layer.weight.data, layer.weight_scales.data = quantize(full)
        require_no_others(readers)
        if dist.get_rank() == 0:
            for _, reader in readers:
                reader.require_equal_copies()
    for name in {part.module for part in parts} & chunks_of.keys():
        for chunk in chunks_of[name]:
            start_magnitudes(unwrap_model(chunk))
    return bool(parts or as_is)


def load_start_adapters(cfg: ConfigContainer, model: list[MegatronModule], rows: int) -> bool:
    """Fill this rank's adapters from the PEFT adapters that their modules start with. Collective; see
    `load_pretrained`.

    Returns:
        True if any module starts with one.

    Raises:
        UserError: an adapter cannot be read, belongs to another model, or has layers that the run's adapters lack.
    """
    folders = {name: Path(module.lora.adapter) for name, module in cfg.modules.items() if module.lora.adapter}
    with agreed():
        chunks_of = modules_of(model)
        places = start_places(cfg, rows) if folders else {}
        for name, folder in folders.items():
            others = {
                path
                for other, same in folders.items()
                if other != name and same == folder
                for path in places[other].paths
            }
            adapters = start_adapter(cfg, name, folder, places[name], others)
            if name in chunks_of:
                load_adapters([unwrap_model(chunk) for chunk in chunks_of[name]], adapters)
    return bool(folders)


def _reads_rows(cfg: ConfigContainer, chunk: ShardedModule) -> bool:
    """Fill the shards of a language model of transformers as it is, and read nothing else. Return False if that is not
    possible: the class converts columns of tensors, or its vocabulary has rows that the directory lacks."""
    key, sizes = f"modules.{LANGUAGE}.pretrained", cfg.llm
    assert isinstance(sizes, TransformersSizes)
    if sizes.vocab_size != sizes.stored_vocab_size:
        return False
    tensors = tensors_of_class(sizes.model_config)
    folder = TensorFolder(Path(cfg.language.pretrained), key)
    rules = {rule.ours: rule for rule in tensors.rules({name: each.shape for name, each in folder.tensors.items()})}
    state = unwrap_model(chunk).model.state_dict(keep_vars=True)
    read = {id(value): name for name, value in state.items() if name in rules}
    if any(id(value) not in read for name, value in state.items() if not is_adapter(name)):
        return False
    local = {name: shard_of(state[name]) for name in read.values()}
    reader = Reader(folder, WeightMap(tuple(rules[name] for name in local)), key)
    reader.fill(
        {name: shard for name, (shard, _) in local.items() if shard.numel()},
        {name: rows or Cut() for name, (_, rows) in local.items()},
    )
    return True


def _parameters(chunks: list[MegatronModule], begins: str) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        for name, parameter in (global_names(chunk) | router_biases(chunk)).items():
            if name.startswith(begins) and not is_adapter(name) and not name.endswith(".weight_scales"):
                yield name, parameter


def _quantized(chunks: list[MegatronModule], begins: str) -> dict[str, Any]:
    """Return the layers with quantized weights by the names of these."""
    layers = {
        f"{global_name(unwrap_model(chunk), path)}.weight": layer
        for chunk in chunks
        for path, layer in quantized_layers(unwrap_model(chunk))
    }
    return {name: layer for name, layer in layers.items() if name.startswith(begins)}


def _cut(parameter: torch.Tensor, groups: RunGroups, module: str) -> Cut:
    """Return how Megatron-Core has cut a parameter over the ranks of its module."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return Cut()
    pgs = groups.collections[module]
    # Weights of experts are cut over their own group.
    group = pgs.tp if getattr(parameter, "allreduce", True) else pgs.expt_tp
    return Cut.of(parameter, group.rank(), group.size())
