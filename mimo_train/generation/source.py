"""Where a model comes from: a run, or one of its checkpoints. Imports torch only to load weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mimo_train.checkpoint import folders
from mimo_train.config.compose import from_dict
from mimo_train.config.schema import ConfigContainer, PlacementConfig
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import FeatureCacheConfig, LayoutConfig, ModuleConfig
from mimo_train.plan.layout import RunLayout

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class Source:
    """A model that can be built and loaded."""

    cfg: ConfigContainer
    """What to build, on one process."""
    load: Callable[[RunLayout, list["MegatronModule"]], None]
    """Reads the weights into the chunks of a model built from `cfg`, and merges its adapters."""
    run_dir: Path | None
    """The run that wrote the weights, where libraries' warnings go; None if they were moved out of it."""


def open_source(path: Path) -> Source:
    """The model in the folder of a run, whose newest checkpoint it is, or of a checkpoint.

    Raises:
        UserError: there is no complete checkpoint, or it is damaged.
    """
    folder = folders.in_folder(path, "CHECKPOINT")
    cfg = from_dict(folders.read_record(folder, "config")["config"])
    return Source(on_one_process(cfg), partial(_load, folder), folders.run_of(folder))


def _load(folder: Path, layout: RunLayout, model: list["MegatronModule"]) -> None:
    from mimo_train.checkpoint.store import load_weights
    from mimo_train.model.lora import merge_lora

    load_weights(folder, layout, model)
    merge_lora(model)


def on_one_process(cfg: ConfigContainer) -> ConfigContainer:
    """The same model with every module on one rank, and one sample at a time, on whatever device is here; without what
    only training uses, such as trackers that are not installed here, or memory for gradients."""
    return replace(
        cfg,
        modules={name: _untrained(module) for name, module in cfg.modules.items()},
        placement=PlacementConfig(mode="shared"),
        train=replace(cfg.train, global_batch_size=1, micro_batch_size=1, rampup_batch_size=[]),
        run=replace(cfg.run, device="auto", inprocess_restarts=0),
        log=LogConfig(),
        profiling=ProfilingConfig(),
    )


def _untrained(module: ModuleConfig) -> ModuleConfig:
    # A parameter that is trained gets a buffer for its gradient, of four bytes a number. What has adapters is frozen
    # already, and their buffers are small.
    freeze = module.freeze if module.lora.rank else ["*"]
    return replace(
        module,
        layout=LayoutConfig(),
        freeze=freeze,
        freeze_until={},
        feature_cache=FeatureCacheConfig(),
        prefetch_microbatches=0,
    )
