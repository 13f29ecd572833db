"""Load `checkpoint.load_modules`: a new run's modules from other runs' checkpoints, at any layout."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.storage.url import Place, place_of
from data.text_format import listed, plural
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.damage import damage_named
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.load import fill, listed_faults, opened, over_ranks, shape_fault, weight_targets
from mimo_train.checkpoint.local_shards import shards_of_model
from mimo_train.checkpoint.resume.choose import chosen_by_first
from mimo_train.checkpoint.resume.same_run import module_faults
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.parts import PARTS, is_adapter
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_checkpoint import LoadConfig
from mimo_train.models.lora.adapters import start_magnitudes
from mimo_train.parallel.collectives import agreed


@dataclass(frozen=True)
class Loaded:
    """Report of a module that was loaded from a checkpoint; tensors have their names in this run."""

    module: str
    folder: Place
    source: str
    taken: int
    new: list[str]
    """Tensors missing in the checkpoint: they keep their values."""
    unused: list[str]
    """Tensors of the checkpoint without a place here, or not selected."""
    changes: list[str]

    def __str__(self) -> str:
        text = f"modules.{self.module}: {plural(self.taken, 'tensor')} of {self.source} in {self.folder}"
        for what, names in (("new", self.new), ("unused", self.unused), ("changed", self.changes)):
            text += f"\n  {what}: {', '.join(names)}" if names else ""
        return text


def load_modules(cfg: ConfigContainer, model: list[MegatronModule], vocabulary_fingerprint: str) -> list[Loaded]:
    """Fill the modules of `checkpoint.load_modules`. Collective.

    Args:
        vocabulary_fingerprint: fingerprint of this run's tokenizer.

    Raises:
        UserError: a checkpoint is damaged or has another model or tokenizer, a pattern matches nothing, a shape
            differs; with `strict` also if a tensor is new or has no place. On every rank, before the module is changed.
    """
    return [_load_module(name, cfg, model, vocabulary_fingerprint) for name in cfg.checkpoint.load_modules]


def _load_module(name: str, cfg: ConfigContainer, model: list[MegatronModule], vocabulary: str) -> Loaded:
    load, key = cfg.checkpoint.load_modules[name], f"checkpoint.load_modules.{name}"
    folder = chosen_by_first(lambda: folders.in_folder(place_of(load.path), f"{key}.path"), f"{key}.path")
    assert folder is not None
    with agreed():
        record = folders.read_record(folder, "config")
        faults, changes = module_faults(folder, record, cfg, name, vocabulary_fingerprint=vocabulary)
        if faults:
            raise ConfigError(faults)
    reader, _ = opened(folder)
    shards = [shard for shard in shards_of_model(model) if shard.module == name]
    names = _stored_names(reader, load.source(name), name)
    wanted = [shard for shard in shards if _is_asked_for(shard.name, load.only)]
    asked = {each for each in over_ranks({shard.name for shard in shards}) if _is_asked_for(each, load.only)}
    report = Loaded(
        module=name,
        folder=folder,
        source=load.source(name),
        taken=len(asked & names.keys()),
        new=sorted(asked - names.keys()),
        unused=sorted(names.keys() - asked),
        changes=changes,
    )
    taken = [shard for shard in wanted if shard.name in names]
    with agreed():
        if LEFT_OUT in record:
            _require_trained(report, key)
        if idle := [pattern for pattern in load.only if not any(_is_asked_for(name, [pattern]) for name in names)]:
            text = f"{', '.join(idle)} matches nothing in checkpoint {folder}: remove or correct it"
            raise UserError(f"{key}.only: {text}")
        others = {shard.name: fault for shard in taken if (fault := shape_fault(shard, names[shard.name], reader))}
        if others:
            raise UserError(
                f"{key}: {listed_faults(others)}; give the same config of the module, or leave it out by {key}.only"
            )
        if load.strict:
            _require_all(report, load, key)
    with agreed(), damage_named(folder):
        fill(reader, weight_targets((shard, names[shard.name]) for shard in taken))
    read = {id(shard.tensor) for shard in taken}
    new = {id(shard.tensor) for shard in shards if is_adapter(shard.name) and id(shard.tensor) not in read}
    for chunk in map(unwrap_model, model):  # the magnitudes of new adapters follow from the loaded weights
        start_magnitudes(chunk, [tensor for tensor, value in chunk.named_parameters() if id(value) in new])
    return report


def _stored_names(reader: Reader, source: str, name: str) -> dict[str, Key]:
    """Return the source's weights by their names here: encoder names contain the module's name."""
    weights = [key for key in reader.index.pieces if key.module == source and key.state == WEIGHT]
    return {re.sub(rf"^encoders\.{re.escape(source)}\.", f"encoders.{name}.", key.name): key for key in weights}


def _is_asked_for(name: str, only: Collection[str]) -> bool:
    return not only or any(fnmatchcase(name, PARTS.get(pattern, pattern)) for pattern in only)


def _require_trained(report: Loaded, key: str) -> None:
    """Reject a trained-only checkpoint that lacks weights: they came from a lost checkpoint or a seed."""
    if missing := [name for name in report.new if not is_adapter(name)]:
        raise UserError(
            f"{key}: checkpoint {report.folder} has trained weights only (checkpoint.trained_only), and not "
            f"{len(missing)} of {report.source} ({listed(missing, 3)}): "
            f"choose what it has with {key}.only, or give a whole one, as its run writes with "
            "checkpoint.trained_only=false"
        )


def _require_all(report: Loaded, load: LoadConfig, key: str) -> None:
    new = [name for name in report.new if not is_adapter(name)]
    lost = [name for name in report.unused if _is_asked_for(name, load.only)]
    faults = [
        f"{len(names)} {what} ({listed(names, 3)})"
        for what, names in (("here are not in it", new), ("in it have no place here", lost))
        if names
    ]
    if faults:
        raise UserError(
            f"{key}: of the weights of {report.source} in checkpoint {report.folder} {' and '.join(faults)}; choose "
            f"with {key}.only, or take what fits: {key}.strict=false"
        )
