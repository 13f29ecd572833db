"""A checkpoint as directories of `transformers`: one, where its modules came from one, else one for each."""

from dataclasses import dataclass, replace
from pathlib import Path

from mimo_train.checkpoint.hf.directory import copy_files, write_config
from mimo_train.checkpoint.hf.export import write_weights
from mimo_train.checkpoint.hf.parts import pretrained_parts
from mimo_train.checkpoint.integrity import verified_record
from mimo_train.config.fault import ConfigError, Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites import COMPOSITES, Composite
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.schema import ConfigContainer
from mimo_train.generation.source import on_one_process
from mimo_train.model.transformer_config import DTYPES
from mimo_train.plan.parameters import embedding_rows
from mimo_train.plan.run import resolve
from mimo_train.training.setup import build_parts, start_processes


@dataclass(frozen=True)
class Written:
    """A directory that was written."""

    folder: Path
    what: str
    """Modules and parts that are in it."""


def export(checkpoint: Path, cfg: ConfigContainer, to: Path, *, dtype: str, largest_file: int) -> list[Written]:
    """Write the model of a checkpoint. On one process.

    Args:
        checkpoint: its folder.
        cfg: of its run.
        to: an empty folder.
        dtype: of the weights: fp32, bf16 or fp16; empty: as in the checkpoint.
        largest_file: in bytes.

    Raises:
        UserError: the checkpoint is damaged.
        ConfigError: a module did not come from a directory, or its directory has gone.
    """
    verified_record(checkpoint)
    alone = on_one_process(cfg)
    # Without the distributed optimizer's copy of the weights: here a model only lends names and shapes.
    run = resolve(replace(alone, optim=replace(alone.optim, distributed_optimizer=False)))
    _require_directories(run.cfg)
    undrawn = {(name, part) for name in run.cfg.modules for part in ("llm", "encoder", "projector")}
    built = build_parts(run, *start_processes(run.cfg), undrawn=undrawn)
    (chunk,) = built.pipeline.model
    parts = pretrained_parts(run.cfg, embedding_rows(run.cfg.llm, built.tokenizer.vocab_size))
    sources = {part.folder: [other for other in parts if other.folder == part.folder] for part in parts}
    written = []
    for source, of_source in sources.items():
        place = to if len(sources) == 1 else to / of_source[0].module
        place.mkdir(exist_ok=True)
        kind = dtype or run.cfg.train.precision
        write_weights(of_source, chunk, checkpoint, place, dtype=DTYPES[kind], largest_file=largest_file)
        copy_files(source, place)
        config = read_directory(str(source), of_source[0].key).config
        if LANGUAGE in [part.module for part in of_source]:
            config = COMPOSITES.get(config["model_type"], Composite("")).with_vocabulary(config, run.cfg.llm.vocab_size)
        write_config(place, config, kind)
        names = dict.fromkeys(part.module for part in of_source)
        written.append(Written(place, " and ".join(names)))
    return written


def _require_directories(cfg: ConfigContainer) -> None:
    missing = [name for name, module in cfg.modules.items() if not module.pretrained]
    if missing:
        what = "llm" if missing[0] == LANGUAGE else "encoder"
        raise ConfigError(
            [
                Fault(
                    f"modules.{missing[0]}.pretrained",
                    f"is empty: the {what} of this run was made here, and is of no family that transformers has",
                )
            ]
        )
