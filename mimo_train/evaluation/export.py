"""Export of a checkpoint as `transformers` directories, and of its adapters in PEFT's format."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.storage.url import Place
from data.text.tokens import Tokenizer
from data.text_format import plural
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.checkpoint.load import opened, require_stored, require_used
from mimo_train.checkpoint.local_shards import shards_of_model
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.fill_in import all_parts, changed_choices, parts_there
from mimo_train.config.pretrained.hub import named_in_hub
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.evaluation.generation.source import load_model, on_ranks
from mimo_train.hf.adapters import is_base, module_adapters
from mimo_train.hf.directory import write_run_tokenizer
from mimo_train.hf.documents import Document, separate
from mimo_train.hf.export import Stored, write_document
from mimo_train.hf.joined import llava
from mimo_train.hf.llava_limits import NoLlava
from mimo_train.hf.peft import Adapted, write_adapters
from mimo_train.hf.push import name_sources
from mimo_train.layout.run import resolve
from mimo_train.training.step.pipeline import build_parts, start_processes

BASE = "base"
"""Folder next to the adapters with their base model, if no existing directory has it."""


@dataclass(frozen=True)
class Exported:
    """A directory that was written."""

    folder: Path
    what: str
    """Modules and parts that are in it."""
    changes: tuple[str, ...] = ()
    """Keys by which the run read images and audio differently from the files, which are those of its source."""


def export(
    checkpoint: Place,
    cfg: ConfigContainer,
    to: Path,
    *,
    dtype: str,
    largest_file: int,
    merge: bool,
    base_model: str = "",
    ema: bool = False,
    announce: Callable[[str], None] = lambda form: None,
) -> tuple[list[Exported], str]:
    """Write the model of a checkpoint. On one process.

    Args:
        checkpoint: its folder.
        cfg: config of its run.
        to: an empty folder.
        dtype: dtype of the weights: fp32, bf16 or fp16; empty: `train.precision` of the config.
        largest_file: in bytes.
        merge: merge adapters into the weights instead of writing them separately.
        base_model: model name in the adapters' files. Empty: its name in the hub if its folder is in the hub's cache,
            else the folder; readers resolve a relative one from their own working directory.
        ema: write the average of the weights, where the checkpoint has one.
        announce: called before anything is written, with what will be.

    Returns:
        The directories written, and why there are several instead of one; empty if there is one.

    Raises:
        UserError: the checkpoint is damaged, PEFT has no place for its adapters, `merge` is given without adapters, or
            `base_model` is given and not exactly one model's adapters are written.
        ConfigError: the directory of a module no longer exists.
    """
    reader, record = opened(checkpoint)
    if merge and not any(module.lora.rank for module in cfg.modules.values()):
        raise UserError(f"--merge puts adapters into the weights, and no module of {checkpoint} has any: leave it out")
    alone = on_ranks(cfg)
    # Without the distributed optimizer's copy of the weights: here a model only gives names and shapes.
    run = resolve(replace(alone, optim=replace(alone.optim, distributed_optimizer=False)))
    undrawn = all_parts(run.cfg)
    if LEFT_OUT in record:
        undrawn = parts_there(run.cfg)
    built = build_parts(run, *start_processes(run.cfg), undrawn=undrawn)
    if LEFT_OUT in record:
        load_model(checkpoint, run.cfg, built.pipeline, built.tokenizer, ema=ema)
    (chunk,) = built.pipeline.model
    if LEFT_OUT not in record:
        shards = [*shards_of_model([chunk])]
        require_stored(shards, reader, checkpoint)
        require_used(shards, reader, checkpoint, None)
    stored = Stored(chunk, None if LEFT_OUT in record else checkpoint, ema=ema)
    documents, reason = documents_of(run.cfg, built.tokenizer)
    adapters = {} if merge else _adapters(run.cfg, documents, stored)
    if base_model and len(adapters) != 1:
        reason = f"adapters are for {plural(len(adapters), 'model')} ({', '.join(adapters)})" if adapters else "none"
        raise UserError(f"--base-model is {base_model}, which adapters name, and {reason} are written: leave it out")
    names = "; ".join(document.what for document in documents)
    if reason:
        announce(f"{len(documents)} directories ({names}), for no model of transformers has all parts: {reason}")
    else:
        announce(f"one directory: {names}")
    kind = dtype or run.cfg.train.precision
    write = partial(_write, run.cfg, stored=stored, dtype=kind, largest_file=largest_file, merge=merge)
    written = []
    for document in documents:
        place = to if len(documents) == 1 else to / document.name
        place.mkdir(parents=True, exist_ok=True)
        own_adapters = adapters.get(document.name)
        if own_adapters is None:
            write(document, to=place)
            copied = document.modules if document.source else ()
            changes = tuple(change for name in copied for change in changed_choices(run.cfg, name))
            written.append(Exported(place, document.what, changes))
            continue
        base = document.source if is_base(run.cfg, document, stored) else None
        if base is None:
            base = place / BASE
            base.mkdir()
            write(document, to=base)
            written.append(Exported(base, document.what))
        task = "SEQ_CLS" if run.cfg.traits.value_head else "CAUSAL_LM"
        task = task if LANGUAGE in document.modules else "FEATURE_EXTRACTION"
        name, revision = (base_model, "") if base_model else named_in_hub(base)
        write_adapters(place, own_adapters, base_model=name, revision=revision, task_type=task)
        if document.has_other_texts and base == document.source:  # as readers of adapters look for them
            write_run_tokenizer(run.cfg, built.tokenizer, place)
        names = " and ".join(part.module for part in own_adapters)
        written.append(Exported(place, f"adapters of {names} for peft, next to {base}"))
    return written, reason


def _write(cfg: ConfigContainer, document: Document, *, to: Path, **options: Any) -> None:
    write_document(document, to=to, **options)
    folders = dict.fromkeys(cfg.modules[name].pretrained for name in document.modules)
    name_sources(to, [Path(folder) for folder in folders if folder])


def documents_of(cfg: ConfigContainer, tokenizer: Tokenizer) -> tuple[list[Document], str]:
    """Return the directories to write, and the reason if there is more than one."""
    rows = embedding_rows(cfg.llm, tokenizer.vocab_size)
    apart = separate(cfg, tokenizer, rows)
    if len(apart) == 1:
        return apart, ""
    try:
        return [llava(cfg, tokenizer, rows)], ""
    except NoLlava as reason:
        return apart, str(reason)


def _adapters(cfg: ConfigContainer, documents: list[Document], stored: Stored) -> dict[str, list[Adapted]]:
    """Return the adapters of each directory, by its name."""
    adapters: dict[str, list[Adapted]] = {}
    for name, module in cfg.modules.items():
        if not module.lora.rank:
            continue
        holders = [document for document in documents if name in document.modules]
        parts = [module_adapters(cfg, name, stored, holder) for holder in holders]
        placed = {adapter for part in parts for adapter in part.adapters}
        left = [part for part in module_adapters(cfg, name, stored, None).adapters if part not in placed]
        if left:
            raise UserError(
                f"{left[0]} of {name} is an adapter next to a layer that no model of transformers has here: give "
                "--merge, which puts adapters into the weights"
            )
        for holder, part in zip(holders, parts, strict=True):
            if part.adapters:
                adapters.setdefault(holder.name, []).append(part)
    return adapters
