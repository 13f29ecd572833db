"""Open the model of a run, a checkpoint or a `transformers` directory on this job's processes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.storage.url import Place, place_of
from data.text.tokens import Tokenizer
from mimo_train.config.pretrained.hub import located
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.generation.source import Source, open_source
from mimo_train.launch.processes import require_none_idle, started_run
from mimo_train.layout.run import Run
from mimo_train.training.step.pipeline import Parts, Pipeline, build_parts, start_processes


@dataclass(frozen=True)
class Model:
    """A trained model on this rank, without an optimizer."""

    run: Run
    """Its config, with the layout on which it is open."""
    parts: Parts
    folder: Place
    """Its checkpoint, or its directory of `transformers`."""
    run_dir: Path | None
    """Folder of the run that trained it; None if it is not on this machine."""

    @property
    def cfg(self) -> ConfigContainer:
        return self.run.cfg

    @property
    def pipeline(self) -> Pipeline:
        return self.parts.pipeline

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts.tokenizer


def open_model(place: str | Place, **options: Any) -> Model:
    """Open a model on the started processes. Collective; the caller destroys the process groups.

    Args:
        place: folder or URL of a run or a checkpoint, folder of a `transformers` model or a PEFT adapter, or its name
            on the hub.
        options: see `open_source`. Without `layout` and `processes`, the model has a replica on each process.

    Raises:
        UserError: see `open_source`; or the layout needs other processes than were started.
    """
    if not options.get("layout"):
        options.setdefault("processes", int(os.environ.get("WORLD_SIZE") or 1))
    return build_model_of(open_source(place_of(located(str(place), "CHECKPOINT")), **options))


def build_model_of(source: Source) -> Model:
    """Build and load a model, as `open_model` does."""
    run = started_run(source.cfg)
    require_none_idle(run)
    parts = build_parts(run, *start_processes(run.cfg), undrawn=source.undrawn)
    source.load(parts.pipeline, parts.tokenizer)
    return Model(run, parts, source.folder, source.run_dir)
