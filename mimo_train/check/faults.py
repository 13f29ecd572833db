"""Every fault of a config that is known without its data. Imports no torch."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from data.demo.make import DEMOS, MARKER
from mimo_train.check.frozen import frozen_faults
from mimo_train.check.optim import DECAYS, optim_faults
from mimo_train.config.schema import LANGUAGE, ConfigContainer, Fault
from mimo_train.plan import layout
from mimo_train.plan.profiling_limits import profiling_faults

CHOICES = {
    "run.device": ("auto", "cuda", "cpu"),
    "data.demo": ("", *DEMOS),
    "train.precision": ("fp32", "bf16", "fp16"),
    "train.recompute": ("none", "selective", "full"),
    "log.runtime_unit": ("", "seconds", "minutes", "hours", "days"),
    "train.on_nan": ("raise", "skip", "bisect"),
    "train.rerun": ("disabled", "validate_results", "report_determinism_stats"),
    "optim.name": ("adamw",),
    "optim.decay": DECAYS,
}
"""Values that a key takes."""

AT_LEAST = {
    "run.seed": 0,
    "data.sequence_length": 1,
    "data.max_bad_samples": 0,
    "data.workers": 0,
    "train.iters": 1,
    "run.inprocess_restarts": 0,
    "log.throughput_window": 0,
    "log.peak_tflops": 0,
    "train.eval_interval": 0,
    "train.eval_samples": 0,
    "train.report_samples": 0,
    "train.log_interval": 1,
    "optim.lr": 0,
    "optim.min_lr": 0,
    "optim.warmup_iters": 0,
    "optim.weight_decay": 0,
    "optim.clip_grad": 0,
    "checkpoint.save_interval": 0,
    "checkpoint.keep": 0,
    "checkpoint.non_persistent_interval": 0,
    "train.exit_interval": 0,
    "train.exit_duration_minutes": 0,
    "train.manual_gc_interval": 0,
    "profiling.step_start": 1,
}
"""Smallest value of a key."""

LIBRARIES = {
    "run.inprocess_restarts": ("nvidia_resiliency_ext.inprocess", "'mimo-train[resiliency]'"),
    "log.wandb": ("wandb", "wandb"),
    "log.mlflow": ("mlflow", "'mimo-train[track]'"),
    "log.comet": ("comet_ml", "'mimo-train[track]'"),
}
"""Modules that a key needs when it is true, and what pip installs them by."""

ABOVE_ZERO = ("run.timeout_minutes", "optim.eps")
"""Keys whose value is positive."""

LEAST_PATIENCE = 0.25
"""`run.timeout_minutes` with in-process restarts, whose barriers wait twice as long, is longer than this."""

LLM_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")


def config_faults(cfg: ConfigContainer) -> list[Fault]:
    """Faults of values, modules, layout, placement and batch, each with its key and numbers."""
    sizes = list(_size_faults(cfg))
    # Divisibility means nothing for sizes below 1.
    found = sizes or list(layout.faults(cfg))
    found += _media_faults(cfg, found)
    known = {fault.key for fault in found}
    others = (
        *_value_faults(cfg),
        *frozen_faults(cfg),
        *_recompute_faults(cfg),
        *optim_faults(cfg),
        *_demo_faults(cfg),
        *_library_faults(cfg),
        *_callback_faults(cfg),
        *profiling_faults(cfg, cfg.run.device, None if found else layout.plan(cfg).world_size),
    )
    return found + [fault for fault in others if fault.key not in known]


def _size_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    llm = cfg.modules[LANGUAGE].llm if LANGUAGE in cfg.modules else None
    if llm is None:
        return
    for field in LLM_SIZES:
        if getattr(llm, field) < 1:
            yield Fault(f"modules.{LANGUAGE}.llm.{field}", f"must be at least 1, is {getattr(llm, field)}")
    if llm.num_query_groups < 0:
        yield Fault(
            f"modules.{LANGUAGE}.llm.num_query_groups",
            f"must be at least 0 (0 means as many as query heads), is {llm.num_query_groups}",
        )
    heads = llm.num_attention_heads
    if llm.position == "rope" and heads > 0 and llm.hidden_size % heads == 0 and llm.hidden_size // heads % 2:
        yield Fault(
            f"modules.{LANGUAGE}.llm.num_attention_heads",
            f"rotary positions need heads of even width, it is {llm.hidden_size // heads} (hidden_size "
            f"{llm.hidden_size} / {heads} heads): change one of them, or use position=learned",
        )


def _media_faults(cfg: ConfigContainer, found: list[Fault]) -> list[Fault]:
    """Encoders whose largest picture or clip alone is longer than a sequence, among those that can be built."""
    faults = []
    for name, module in cfg.encoders.items():
        parts = (f"modules.{name}.encoder", f"modules.{name}.projector")
        if any(fault.key.startswith(parts) for fault in found):
            continue
        encoder, merge = module.encoder, module.projector.merge
        tokens = encoder.most_tokens(merge)
        if tokens > cfg.data.sequence_length > 0:
            read_as, patches, _ = encoder.describe_input(merge)
            faults.append(
                Fault(
                    "data.sequence_length",
                    f"one {encoder.medium} takes {tokens} tokens of modules.{name} ({read_as}, {patches}, merge "
                    f"{merge}), a sequence has only {cfg.data.sequence_length}: raise it above {tokens}, or raise "
                    f"modules.{name}.projector.merge",
                )
            )
    return faults


def _value_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    for key, choices in CHOICES.items():
        value = _value(cfg, key)
        if value not in choices:
            yield Fault(key, f"must be {' or '.join(choice or 'empty' for choice in choices)}, is {value!r}")
    for key, least in AT_LEAST.items():
        if _value(cfg, key) < least:
            yield Fault(key, f"must be at least {least}, is {_value(cfg, key)}")
    for key in ABOVE_ZERO:
        if _value(cfg, key) <= 0:
            yield Fault(key, f"must be above 0, is {_value(cfg, key)}")
    if cfg.run.inprocess_restarts > 0 and 0 < cfg.run.timeout_minutes <= LEAST_PATIENCE:
        yield Fault(
            "run.timeout_minutes",
            f"must be above {LEAST_PATIENCE} with run.inprocess_restarts {cfg.run.inprocess_restarts}, is "
            f"{cfg.run.timeout_minutes}: ranks tell each other every second that they live, and miss it after 30",
        )
    if cfg.run.inprocess_restarts > 0 and cfg.checkpoint.resume != "auto":
        yield Fault(
            "checkpoint.resume",
            f"must be auto with run.inprocess_restarts {cfg.run.inprocess_restarts}, is {cfg.checkpoint.resume!r}: a "
            "run that starts again continues from its newest checkpoint",
        )
    for key in ("optim.beta1", "optim.beta2"):
        if not 0 <= _value(cfg, key) < 1:
            yield Fault(key, f"must be at least 0 and below 1, is {_value(cfg, key)}")
    if any(step < 1 for step in cfg.train.skip_iters):
        yield Fault("train.skip_iters", f"steps are counted from 1, has {min(cfg.train.skip_iters)}")
    optim = cfg.optim
    if 0 <= optim.lr < optim.min_lr:
        yield Fault("optim.min_lr", f"must be at most optim.lr {optim.lr}, is {optim.min_lr}")
    if cfg.data.demo and not cfg.data.shards:
        yield Fault("data.shards", f"data.demo={cfg.data.demo} needs a folder to make the shards in, is empty")


def _recompute_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    for name, module in cfg.modules.items():
        choices = ("", *CHOICES["train.recompute"])
        if module.recompute not in choices:
            yield Fault(
                f"modules.{name}.recompute",
                f"must be {' or '.join(choice or 'empty' for choice in choices)}, is {module.recompute!r}",
            )


def _callback_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    for entry in cfg.train.callbacks:
        if not re.fullmatch(r"\w+(\.\w+)*:\w+", entry):
            yield Fault("train.callbacks", f"must be entries package.module:Class, one is {entry!r}")


def _library_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    for key, (module, install) in LIBRARIES.items():
        if not _value(cfg, key):
            continue
        if not _is_installed(module):
            off = str(type(_value(cfg, key))()).lower()
            yield Fault(key, f"{module} is not installed: run `pip install {install}`, or set {key}={off}")


def _is_installed(module: str) -> bool:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # of its package
        return False
    # A folder of that name in the working directory is found too, without an origin.
    return found is not None and found.origin is not None


def _demo_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Making a demo replaces every *.tar of its two folders: never where other shards stand."""
    demo, shards = cfg.data.demo, Path(cfg.data.shards)
    if demo not in DEMOS or not cfg.data.shards:
        return
    places = {"data.shards": shards.parent / "train", "data.validation_shards": shards.parent / "held_out"}
    for key, place in places.items():
        given = _value(cfg, key)
        if given and Path(given) != place:
            yield Fault(
                "data.demo",
                f"the {demo} demo would be made in {places['data.shards']} and {places['data.validation_shards']}, but "
                f"{key} is {given}: set data.demo= (empty) to train on shards of your own",
            )
            return
        if any(place.glob("*.tar")) and not (shards.parent / MARKER).is_file():
            yield Fault(
                "data.demo",
                f"the {demo} demo would replace the shards of {place}, which are not a demo's (there is no "
                f"{shards.parent / MARKER}): set data.demo= (empty) to train on them",
            )
            return


def _value(cfg: ConfigContainer, key: str):
    section, field = key.split(".")
    return getattr(getattr(cfg, section), field)
