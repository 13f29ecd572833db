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
from mimo_train.config.pretrained.config_of_directory import config_of_directory, is_directory_of_a_model
from mimo_train.config.pretrained.fill_in import parts_there
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import FeatureCacheConfig, LayoutConfig, ModuleConfig
from mimo_train.config.schema_run import PlacementConfig

if TYPE_CHECKING:
    from data.text.tokens import Tokenizer
    from mimo_train.training.step.pipeline import Pipeline


@dataclass(frozen=True)
class Source:
    """A model that can be built and loaded."""

    cfg: ConfigContainer
    """Config to build, on one process."""
    load: Callable[["Pipeline", "Tokenizer"], None]
    """Reads the weights into a model built from `cfg`, and merges its adapters."""
    run_dir: Path | None
    """Run that wrote the weights, which gets libraries' warnings; None for moved weights or object storage."""
    undrawn: Set[tuple[str, str]] = frozenset()
    """Parts whose initial weights need not be drawn, see `build_model`."""


def open_source(path: Place, *, trust_code: bool = False, seconds: float = 0) -> Source:
    """Return the model in a folder: of a run (its newest checkpoint), a checkpoint, or a `transformers` model.

    Args:
        trust_code: import encoders that the config of a checkpoint names by their paths.
        seconds: length of the longest audio that a `transformers` model is to read.

    Raises:
        UserError: there is no complete checkpoint, it is damaged, it names code that is not trusted, or the directory's
            model cannot be built.
    """
    if not isinstance(path, Url) and is_directory_of_a_model(path):
        alone = on_one_process(config_of_directory(path, seconds))
        return Source(alone, partial(_load_directory, alone), None, parts_there(alone))
    folder = folders.in_folder(path, "CHECKPOINT")
    alone = on_one_process(recorded_config(folder, trust_code=trust_code))
    run_dir = folders.run_of(folder)
    return Source(alone, partial(_load, folder, alone), None if isinstance(run_dir, Url) else run_dir)


def load_model(folder: Place, cfg: ConfigContainer, pipeline: "Pipeline", tokenizer: "Tokenizer") -> None:
    """Read a checkpoint into a model with initial weights. Collective; raises as `store.load_checkpoint` does."""
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
    load_checkpoint(folder, pipeline.layout, pipeline.model)


def _load(folder: Place, cfg: ConfigContainer, pipeline: "Pipeline", tokenizer: "Tokenizer") -> None:
    from mimo_train.models.lora import merge_lora

    load_model(folder, cfg, pipeline, tokenizer)
    merge_lora(pipeline.model)


def _load_directory(cfg: ConfigContainer, pipeline: "Pipeline", tokenizer: "Tokenizer") -> None:
    from mimo_train.estimate.parameters import embedding_rows
    from mimo_train.hf.load import load_pretrained, load_start_adapters
    from mimo_train.models.lora import merge_lora

    rows = embedding_rows(cfg.llm, tokenizer.vocab_size)
    load_pretrained(cfg, pipeline.model, pipeline.groups, rows)
    load_start_adapters(cfg, pipeline.model, rows)
    merge_lora(pipeline.model)


def on_one_process(cfg: ConfigContainer) -> ConfigContainer:
    """Return the config with every module on one rank and one sample at a time, on any device. Training-only settings
    are reset, such as trackers and gradient buffers."""
    return replace(
        cfg,
        modules={name: _untrained(module) for name, module in cfg.modules.items()},
        placement=PlacementConfig(mode="shared"),
        train=replace(
            cfg.train,
            global_batch_size=1,
            micro_batch_size=1,
            rampup_batch_size=[],
            # fp8 matmuls need more than one token at a time, and few devices support them.
            fp8="none",
            num_layers_at_start_in_bf16=0,
            num_layers_at_end_in_bf16=0,
            compile="none",
        ),
        run=replace(cfg.run, device="auto", inprocess_restarts=0),
        log=LogConfig(),
        profiling=ProfilingConfig(),
    )


def _untrained(module: ModuleConfig) -> ModuleConfig:
    # A trained parameter gets a gradient buffer of 4 bytes per number. With adapters the base is frozen already, and
    # the adapters' buffers are small.
    freeze = module.freeze if module.lora.rank else ["*"]
    return replace(
        module,
        layout=LayoutConfig(),
        freeze=freeze,
        freeze_until={},
        fp8="",
        compile="",
        feature_cache=FeatureCacheConfig(),
        prefetch_microbatches=0,
    )
