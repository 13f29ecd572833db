"""The origin of a model: a run, one of its checkpoints, or a `transformers` directory. Imports torch only to load
weights."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data.storage.url import Place, Url
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.resume.same_run import recorded_config
from mimo_train.config.errors import UserError
from mimo_train.config.parts import parts_of
from mimo_train.config.pretrained.config_of_directory import config_of_directory, is_directory_of_a_model
from mimo_train.config.pretrained.fill_in import parts_there
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_distill import DISTILL, SFT, DistillConfig
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import FeatureCacheConfig, ModuleConfig
from mimo_train.evaluation.layouts import with_layout
from mimo_train.inputs.datasets import without_metrics

if TYPE_CHECKING:
    from data.text.tokens import Tokenizer
    from mimo_train.training.step.pipeline import Pipeline


@dataclass(frozen=True)
class Source:
    """A model that can be built and loaded."""

    folder: Place
    """Its checkpoint, or its directory of `transformers`."""
    cfg: ConfigContainer
    """Config to build, on the chosen layout."""
    load: Callable[["Pipeline", "Tokenizer"], None]
    """Reads the weights into a model built from `cfg`, and merges its adapters unless `open_source(merge=False)`."""
    run_dir: Path | None
    """Run that wrote the weights, which gets libraries' warnings; None for moved weights or object storage."""
    is_directory: bool = False
    """True for a directory of `transformers`."""
    trained: ConfigContainer | None = None
    """Config of the run that trained it; None for a directory of `transformers`."""
    undrawn: Set[tuple[str, str]] = frozenset()
    """Parts whose initial weights need not be drawn, see `build_model`."""


def open_source(
    path: Place,
    *,
    trust_code: bool = False,
    seconds: float = 0,
    layout: str = "",
    processes: int = 1,
    micro_batch_size: int = 1,
    merge: bool = True,
    tokenizer: str = "",
    ema: bool = False,
) -> Source:
    """Return the model in a folder: of a run (its newest checkpoint), a checkpoint, or a `transformers` model.

    Args:
        trust_code: import encoders that the config of a checkpoint names by their paths.
        seconds: length of the longest audio that a `transformers` model is to read.
        layout, processes, micro_batch_size: see `on_ranks`.
        merge: merge adapters into the weights, as an export does. Otherwise they compute as in training.
        tokenizer: that of a `transformers` model without one.
        ema: read the average of the weights, where the run has one.

    Raises:
        UserError: there is no complete checkpoint, it is damaged or has no average, it names code that is not trusted,
            the directory's model cannot be built, or there is no such layout.
    """
    if not isinstance(path, Url) and is_directory_of_a_model(path):
        if ema:
            raise UserError(f"--ema: {path} is a directory of transformers, which has no average of weights. Remove it")
        cfg = on_ranks(config_of_directory(path, seconds, tokenizer), layout, processes, micro_batch_size)
        return Source(path, cfg, partial(_load_directory, cfg, merge), None, True, undrawn=parts_there(cfg))
    folder = folders.in_folder(path, "CHECKPOINT")
    trained = recorded_config(folder, trust_code=trust_code)
    if ema:
        require_average(trained, folder)
    cfg = on_ranks(trained, layout, processes, micro_batch_size)
    run_dir = folders.run_of(folder)
    run_dir = None if isinstance(run_dir, Url) else run_dir
    return Source(folder, cfg, partial(_load, folder, cfg, merge, ema), run_dir, trained=trained)


def require_average(cfg: ConfigContainer, folder: Place) -> None:
    """Raise UserError if no module of a checkpoint has an average of its weights. `cfg`: the checkpoint's config."""
    trained = (name for name, module in cfg.modules.items() if not set(parts_of(name)) <= set(module.freeze))
    if not any(cfg.optim_of(name).ema for name in trained):
        reason = "optim.ema is 0 for every trained module of its run"
        raise UserError(f"--ema: {folder} has no average of weights ({reason}). Remove --ema")


def load_model(
    folder: Place, cfg: ConfigContainer, pipeline: "Pipeline", tokenizer: "Tokenizer", *, ema: bool = False
) -> None:
    """Read a checkpoint into a model with initial weights. Collective; raises as `store.load_checkpoint` does. `ema`:
    see `open_source`."""
    from mimo_train.checkpoint.folders import LEFT_OUT
    from mimo_train.checkpoint.load import load_base, load_checkpoint
    from mimo_train.checkpoint.load_modules import load_modules
    from mimo_train.estimate.parameters import embedding_rows
    from mimo_train.hf.load import load_pretrained
    from mimo_train.models.parameters import load_start_weights

    if LEFT_OUT in folders.read_record(folder, "config"):
        # The checkpoint has only trained weights: load the others as the run did at its start.
        load_pretrained(cfg, pipeline.model, pipeline.groups, embedding_rows(cfg.llm, tokenizer.vocab_size))
        load_start_weights(pipeline.model)
        load_base(folder, pipeline.layout, pipeline.model)
        load_modules(cfg, pipeline.model, tokenizer.vocabulary_fingerprint)
    load_checkpoint(folder, pipeline.layout, pipeline.model, ema=ema)


def _load(
    folder: Place, cfg: ConfigContainer, merge: bool, ema: bool, pipeline: "Pipeline", tokenizer: "Tokenizer"
) -> None:
    from mimo_train.models.lora.adapters import merge_lora

    load_model(folder, cfg, pipeline, tokenizer, ema=ema)
    if merge:
        merge_lora(pipeline.model)


def _load_directory(cfg: ConfigContainer, merge: bool, pipeline: "Pipeline", tokenizer: "Tokenizer") -> None:
    from mimo_train.estimate.parameters import embedding_rows
    from mimo_train.hf.load import load_pretrained, load_start_adapters
    from mimo_train.models.lora.adapters import merge_lora

    rows = embedding_rows(cfg.llm, tokenizer.vocab_size)
    load_pretrained(cfg, pipeline.model, pipeline.groups, rows)
    load_start_adapters(cfg, pipeline.model, rows)
    if merge:
        merge_lora(pipeline.model)


def on_ranks(cfg: ConfigContainer, layout: str = "", processes: int = 1, micro_batch_size: int = 1) -> ConfigContainer:
    """Return the config at another layout, on any device. Training-only settings are reset, such as trackers and
    gradient buffers.

    Args:
        layout: see `with_layout`; empty: every module on the same ranks, with `processes` replicas.
        micro_batch_size: samples of a replica at a time, all in one microbatch; 0: as in training, with a whole number
            of microbatches near the size of its steps.
    """
    cfg = without_metrics(with_layout(cfg, layout, processes))
    replicas, step = cfg.language.layout.dp, cfg.train.global_batch_size
    microbatch = (micro_batch_size or cfg.train.micro_batch_size) * replicas
    return replace(
        cfg,
        modules={name: _untrained(module) for name, module in cfg.modules.items()},
        train=replace(
            cfg.train,
            global_batch_size=microbatch if micro_batch_size else microbatch * max(1, round(step / microbatch)),
            micro_batch_size=micro_batch_size or cfg.train.micro_batch_size,
            rampup_batch_size=[],
            task=SFT if cfg.train.task == DISTILL else cfg.train.task,  # without the teacher
            # fp8 matmuls need more than one token at a time, and few devices support them.
            fp8="none",
            num_layers_at_start_in_bf16=0,
            num_layers_at_end_in_bf16=0,
            compile="none",
        ),
        run=replace(cfg.run, device="auto", inprocess_restarts=0),
        distill=DistillConfig(),
        log=LogConfig(),
        profiling=ProfilingConfig(),
    )


def _untrained(module: ModuleConfig) -> ModuleConfig:
    # A trained parameter gets a gradient buffer of 4 bytes per number. With adapters the base is frozen already, and
    # the adapters' buffers are small.
    freeze = module.freeze if module.lora.rank else ["*"]
    return replace(
        module,
        freeze=freeze,
        freeze_until={},
        fp8="",
        compile="",
        feature_cache=FeatureCacheConfig(),
        prefetch_microbatches=0,
    )
