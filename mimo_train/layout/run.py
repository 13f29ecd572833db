"""A validated run: `resolve` checks a config, reports all its faults, and derives its layout and batch."""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from data.storage.url import Place, place_of
from encoders.base import most_tokens
from encoders.key_rules import MOST, near_names
from encoders.transformers_media.spec import MediaSpec
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import VideoConfig
from mimo_train.config.schema_modules import MOST_RANKS, ModuleConfig
from mimo_train.config.schema_train import TrainConfig
from mimo_train.config.transformers_llm import TransformersSizes
from mimo_train.layout.adapters import adapter_faults
from mimo_train.layout.batch import Batch, batch_faults, packing_faults
from mimo_train.layout.decoding import require_decodable
from mimo_train.layout.kernels import compile_faults, fp8_faults, recompute_part_faults
from mimo_train.layout.legality import (
    bidirectional_faults,
    deepstack_faults,
    layer_faults,
    module_faults,
    projector_faults,
)
from mimo_train.layout.placement import placement_faults
from mimo_train.layout.ranks import RunLayout, lay_out, warm_up

INPUT_KEYS = ("data.tokenizer", "data.chat_template", "data.shards", "data.validation_shards", "data.test_shards")
"""Keys of files that may be missing when a config is checked without data."""


@dataclass(frozen=True)
class Run:
    """A config with its layout and batch. Training uses `resolve`; `check` builds one if both have no faults."""

    cfg: ConfigContainer
    layout: RunLayout
    batch: Batch

    @property
    def dir(self) -> Path:
        """Folder that the run writes to."""
        return Path(self.cfg.run.dir)

    @property
    def checkpoints(self) -> Place:
        """Folder or URL that contains the folder `checkpoints`."""
        return place_of(self.cfg.checkpoint.dir) if self.cfg.checkpoint.dir else self.dir


def with_iters(run: Run, iters: int) -> Run:
    """Return the run with `iters` steps, a number that follows from its data."""
    return replace(run, cfg=replace(run.cfg, train=replace(run.cfg.train, iters=iters)))


def steps_of_epochs(run: Run, samples: int) -> int:
    """Return the number of steps of `train.epochs`, for epochs of `samples` samples."""
    # As a decimal number: 0.1 of 30 samples are 3 samples, not 4.
    return max(1, run.batch.steps_of(math.ceil(Fraction(str(run.cfg.train.epochs)) * samples)))


def in_flight(run: Run, name: str, stage: int) -> int:
    """Return the microbatches between forward and backward on a stage. Under 1F1B this is the number of stages left, at
    most m. With v interleaved chunks per stage, it counts microbatches of one chunk: min(v m, 2 (stages - stage - 1) +
    (v - 1) stages + 1), the warm-up of Megatron-Core 0.19.2 (schedules.py:902) plus one. The first chunk, which shared
    encoders are in, computes 2 stages microbatches ahead of its first gradient, at most m (`warm_up`)."""
    microbatches, language = run.batch.num_microbatches, run.layout.language
    if language.vpp == 1 or name != LANGUAGE:
        shared = language.vpp > 1 and any(edge.is_shared for edge in run.layout.edges_from(name))
        return min(microbatches, 1 + warm_up(run.layout, name, stage) + shared)
    ahead = 2 * (language.pp - stage - 1) + (language.vpp - 1) * language.pp
    return min(language.vpp * microbatches, ahead + 1)


def length_of(train: TrainConfig) -> str:
    """Return the length of a run as text, with the key that sets it."""
    return f"the {train.iters} steps of train.epochs {train.epochs:g}" if train.epochs else f"train.iters {train.iters}"


def all_made(train: TrainConfig, step: int) -> str:
    """Return the message for a run that has done all its steps."""
    return f"nothing to do: step {step} of {length_of(train)} is done. Raise it, or choose a new run.dir"


def resolve(cfg: ConfigContainer, ranks_per_node: int = 0) -> Run:
    """Check a config and derive its layout and batch.

    Args:
        ranks_per_node: processes that the launcher started on each of several nodes, used if `placement` does not set
            it; 0 without a launcher or on one node.

    Raises:
        UserError: `cfg` is not a `ConfigContainer`.
        ConfigError: all of `config_faults`.
    """
    require_config(cfg)
    placed = on_nodes(cfg, ranks_per_node)
    if faults := config_faults(placed):
        raise ConfigError(faults)
    # Keep the user's config: saved with the launcher's number, it would not fit other nodes.
    return Run(cfg, lay_out(placed), Batch.of(cfg))


def require_config(cfg: object) -> None:
    """Raise UserError unless `cfg` is a `ConfigContainer` (and not the name of a config, for example)."""
    if not isinstance(cfg, ConfigContainer):
        raise UserError(
            f"config: expected a ConfigContainer, got {type(cfg).__name__}. Load one with "
            'mimo_train.config.compose.load("gpt_tiny", ["train.iters=10"])'
        )


def on_nodes(cfg: ConfigContainer, ranks_per_node: int) -> ConfigContainer:
    """Return the config with `placement.ranks_per_node` filled in if it is not set."""
    if cfg.placement.ranks_per_node:
        return cfg
    return dataclasses.replace(cfg, placement=dataclasses.replace(cfg.placement, ranks_per_node=ranks_per_node))


def with_config_faults(error: ConfigError) -> ConfigError:
    """Add the faults of the rest of a config to the errors of reading it. Faults that name a wrong key or belong to its
    module are left out: they may follow from the key's default."""
    if error.cfg is None:
        return error
    doubtful = [key for fault in error.faults for key in (fault.key, *fault.meant)]
    modules = [".".join(key.split(".")[:2]) + "." for key in doubtful if key.startswith("modules.")]
    rest = [
        fault
        for fault in config_faults(error.cfg)
        if not fault.key.startswith(tuple(modules)) and not any(_names(key, str(fault)) for key in doubtful)
    ]
    return ConfigError([*error.faults, *rest])


def _names(key: str, text: str) -> bool:
    """True if `text` contains `key` as a whole, not as the start of a longer key."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) is not None


def config_faults(cfg: ConfigContainer) -> list[Fault]:
    """Return all faults of a config that do not depend on its data."""
    faults = [*layout_faults(cfg)]
    faults += _media_faults(cfg, faults)
    faults += _length_faults(cfg)
    world_size = None if faults else lay_out(cfg).world_size
    keys = {fault.key for fault in faults}
    others = [
        *cfg.faults(),
        *([] if faults else [*packing_faults(cfg), *fp8_faults(cfg), *compile_faults(cfg), *_generation_faults(cfg)]),
        *([] if faults else recompute_part_faults(cfg)),
        *layer_faults(cfg),
        *cfg.profiling.faults(cfg.run.device, cfg.train.iters or MOST, world_size),
    ]
    return faults + [fault for fault in others if fault.key not in keys]


def _generation_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield the fault of a layout that cannot generate the answers that metrics are of."""
    sets = {f"{key}.metrics": item.metrics for key, item in cfg.data.named_sets.items()}
    wanted = next(
        (key for key, metrics in {"train.eval_metrics": cfg.train.eval_metrics, **sets}.items() if metrics), None
    )
    if wanted is None:
        return
    if cfg.traits.form != "turns":
        text = f"needs samples with one answer, and those of train.task={cfg.train.task} have several or a label"
        yield Fault(wanted, f"{text}. Leave the metrics out, and score checkpoints with `mimo-train evaluate`")
        return
    try:
        require_decodable(lay_out(cfg))
    except ConfigError as error:
        remedy = "Leave the metrics out, and score checkpoints with `mimo-train evaluate`"
        yield Fault(wanted, f"needs generated answers. {error.faults[0]}. {remedy}")


def layout_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of modules, sizes, ranks and batch."""
    stray = [name for name, module in cfg.modules.items() if name != LANGUAGE and _is_empty(module)]
    of_modules = [
        fault
        for name, module in cfg.modules.items()
        for fault in ([_stray(name, cfg, stray)] if name in stray else module_faults(name, module))
    ]
    yield from of_modules
    if LANGUAGE not in cfg.modules:
        yield Fault("modules", f"a run needs a module named {LANGUAGE!r}, has {', '.join(cfg.modules) or 'none'}")
        return
    if of_modules:
        sections = tuple(f"modules.{name}.layout" for name in cfg.modules)
        if not stray and not any(fault.key.startswith(sections) for fault in of_modules):
            yield from batch_faults(cfg)
        return
    too_many = [*_world_faults(cfg)]
    yield from too_many
    if too_many:
        return
    width = cfg.llm.hidden_size
    yield from (fault for name, module in cfg.modules.items() for fault in adapter_faults(name, module, width))
    yield from (fault for name, module in cfg.encoders.items() for fault in projector_faults(module, width, name))
    yield from bidirectional_faults(cfg)
    yield from deepstack_faults(cfg)
    yield from placement_faults(cfg)
    yield from batch_faults(cfg)


def _world_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    for name, module in cfg.modules.items():
        layout = module.layout
        ranks = layout.tp * layout.cp * layout.dp * layout.pp
        if ranks > MOST_RANKS:
            sizes = f"tp {layout.tp} * cp {layout.cp} * dp {layout.dp} * pp {layout.pp}"
            yield Fault(f"modules.{name}.layout", f"{sizes} are {ranks} ranks, more than {MOST_RANKS}: lower one")


def _is_empty(module: ModuleConfig) -> bool:
    return module.encoder is None and module.projector is None and module.llm is None


def _stray(name: str, cfg: ConfigContainer, stray: list[str]) -> Fault:
    present = [other for other in cfg.modules if other not in stray]
    near = near_names(name, present)
    remedy = (
        f"Did you mean modules.{near[0]}?"
        if near
        else "pick a layout=... for these modules where a layout file names it, or give it an encoder and a projector"
    )
    return Fault(
        f"modules.{name}.encoder",
        f"missing: the modules of this run are {', '.join(present) or 'none'}, and a file or an override names {name}: "
        f"{remedy}",
    )


def _length_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    llm = cfg.modules[LANGUAGE].llm if LANGUAGE in cfg.modules else None
    if not isinstance(llm, LlmSpec) or llm.rope_scaling.kind != "dynamic":
        return
    if cfg.data.sequence_length > llm.max_positions > 0:
        yield Fault(
            "data.sequence_length",
            f"is {cfg.data.sequence_length}, and the frequencies of modules.{LANGUAGE}.llm.rope_scaling.kind dynamic "
            f"would depend on the batch beyond max_positions {llm.max_positions}: set it to at most that",
        )


def _sound_faults(name: str, cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield the config errors of a module whose encoder reads the sound of videos."""
    readers: dict[str, list[str]] = {"image": [], "audio": []}
    for other, module in cfg.encoders.items():
        readers[module.encoder.kind].append(other)
    paths = {getattr(cfg.modules[other].encoder, "path", "") for of_kind in readers.values() for other in of_kind}
    if [len(of_kind) for of_kind in readers.values()] != [1, 1] or len(paths) > 1:
        others = ", ".join(other for other in cfg.encoders if other != name) or "none"
        yield Fault(
            f"modules.{name}.encoder.sound",
            "is true, which requires one module for images and one for audio, both of one directory (other modules: "
            f"{others}). Set pretrained for all modules, or set it to false",
        )


def _media_faults(cfg: ConfigContainer, faults: list[Fault]) -> Iterator[Fault]:
    for name, module in cfg.encoders.items():
        prefix = f"modules.{name}"
        if any(fault.key.startswith((f"{prefix}.encoder", f"{prefix}.projector")) for fault in faults):
            continue
        encoder, merge = module.encoder, module.projector.merge
        if getattr(encoder, "axes", False) and not cfg.llm.mrope_section:
            yield Fault(
                f"modules.{LANGUAGE}.pretrained",
                f"the images of {prefix} have positions in time, row and column, which this language model does not "
                f"get: set it to {encoder.path}, with implementation native",
            )
        if encoder.reads_videos and cfg.data.video != VideoConfig():
            text = f"is set, but {prefix} reads videos as its processor does. Set {prefix}.encoder.video, for example"
            yield Fault("data.video", f"{text} {{fps: 1}}")
        if encoder.sound:
            yield from _sound_faults(name, cfg)
        is_of_another = cfg.modules[LANGUAGE].pretrained != getattr(encoder, "path", "")
        if is_of_another and getattr(encoder, "class_positions", False) and not isinstance(cfg.llm, TransformersSizes):
            yield Fault(
                f"modules.{LANGUAGE}.pretrained",
                f"the images of {prefix} have positions that only the class of transformers has: set it to "
                f"{encoder.path}",
            )
        tokens = most_tokens(encoder, module.projector)
        if tokens > cfg.data.sequence_length > 0:
            read_as, patches, _ = encoder.describe_input(merge)
            details, remedy = f"{read_as}, {patches}, merge {merge}", f"raise {prefix}.projector.merge"
            if getattr(encoder, "resize", "") == "native" and hasattr(encoder, "max_pixels"):
                remedy = f"lower {prefix}.encoder.max_pixels"
            if isinstance(encoder, MediaSpec):
                details, remedy = read_as, f"lower the sizes in the processor of {encoder.path}"
                if hasattr(encoder, "max_seconds") and encoder.sizes_vary:
                    remedy = f"lower {prefix}.encoder.max_seconds"
            yield Fault(
                "data.sequence_length",
                f"one {encoder.medium} takes {tokens} tokens of {prefix} ({details}), a sequence has only "
                f"{cfg.data.sequence_length}: raise it above {tokens}, or {remedy}",
            )


def warm_up_warnings(cfg: ConfigContainer, last_step: int | None = None) -> Iterator[str]:
    """Yield warnings about learning rates that never reach their peak. These are no faults: trial runs have few steps.
    `last_step`: last step of the run if its data may end it before `train.iters`."""
    length = cfg.train.iters if last_step is None else last_step
    named = f"train.iters {length}" if length == cfg.train.iters else f"the {length} steps that the data lasts for"
    steps_of = {"optim": cfg.optim.warmup_iters}
    steps_of |= {f"modules.{name}.optim": module.optim.warmup_iters or 0 for name, module in cfg.modules.items()}
    for key, steps in steps_of.items():
        if steps >= length > 0:  # not known yet
            # Step n has the rate of n - 1 warm-up steps, so the peak comes one step later.
            compared = "longer than" if steps > length else "as long as"
            yield (
                f"{key}.warmup_iters {steps} is {compared} {named}: the learning rate never "
                "reaches its peak; lower it, unless this run is a trial"
            )
