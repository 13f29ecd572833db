"""Adapters of a run, and where `transformers` has the layers that they are beside."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from mimo_train.config.parts import is_adapter
from mimo_train.config.schema import ConfigContainer
from mimo_train.hf.documents import Document
from mimo_train.hf.export import Stored, Weights
from mimo_train.hf.fill import Cut, Reader
from mimo_train.hf.parts import ENCODER
from mimo_train.hf.peft import Adapted, Place
from mimo_train.hf.places import places_of, unread_tensors
from mimo_train.hf.tensors import TensorFolder
from mimo_train.layout.adapters import linears

_IN_CACHE = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")


@dataclass(frozen=True)
class ModuleAdapters(Adapted):
    """The adapters of one module."""

    module: str = ""


def module_adapters(cfg: ConfigContainer, name: str, stored: Stored, document: Document | None) -> ModuleAdapters:
    """The adapters of a module beside the layers that a directory has of it; of all layers without one."""
    config, source = cfg.modules[name], Weights(stored, name)
    layers = linears(name, config, cfg.llm.hidden_size)
    places: dict[str, dict[str, Place]] = {}
    for part in document.parts if document is not None else ():
        if part.module == name and not part.weights.is_renamed:
            places |= places_of(part.weights, part.loaded, layers)
    own = [
        one
        for one in source.tensors
        if is_adapter(one) and (document is None or any(one.startswith(f"{linear}.") for linear in places))
    ]
    adapters = {one: source.load(one) for one in own}
    carried: dict[str, torch.Tensor] = {}
    for part in document.parts if document is not None and config.lora.adapter else ():
        if part.module == name and any(rule.ours.startswith(ENCODER) for rule in part.weights.rules):
            carried |= unread_tensors(config, name, part.weights, part.loaded)
    return ModuleAdapters(adapters, config.lora, layers, places, carried, name)


def is_base(document: Document, stored: Stored) -> bool:
    """Whether the weights beside which adapters were trained are those of the directory that they came from."""
    if document.source is None:
        return False
    if any(part.written != part.weights for part in document.sources):
        return False  # with rows that the directory has not
    for part in document.sources:
        folder, source = TensorFolder(part.folder, part.key), Weights(stored, part.module)
        reader = Reader(folder, part.weights, part.key)
        for rule in part.weights.rules:
            trained = source.load(rule.ours)
            there = torch.empty_like(trained)
            reader.fill({rule.ours: there}, {rule.ours: Cut()})
            if not torch.equal(trained, there):
                return False
    return True


def named_in_hub(folder: Path) -> tuple[str, str]:
    """(what names the model in a folder, its revision). One of the cache of huggingface_hub has the name and the
    revision of its hub, which mean the same on any machine; any other its path, and no revision."""
    found = _IN_CACHE.search(folder.absolute().as_posix())
    return (found[1].replace("--", "/"), found[2]) if found else (str(folder.resolve()), "")
