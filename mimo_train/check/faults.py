"""Every fault of a config that is known without its data. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from data.demo import MARKER
from encoders.spec import num_tokens
from mimo_train import layout
from mimo_train.config import LANGUAGE, ConfigContainer, Fault
from mimo_train.memory import PARTS

CHOICES = {
    "run.device": ("auto", "cuda", "cpu"),
    "data.demo": ("", "digits", "text"),
    "train.precision": ("fp32", "bf16"),
    "train.recompute": ("none", "selective", "full"),
    "optim.name": ("adamw",),
    "optim.decay": ("cosine", "linear", "constant"),
}
"""Values that a key takes."""

AT_LEAST = {
    "run.seed": 0,
    "data.sequence_length": 1,
    "data.max_bad_samples": 0,
    "data.workers": 0,
    "train.iters": 1,
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
}
"""Smallest value of a key."""

ABOVE_ZERO = ("run.timeout_minutes", "optim.eps")
"""Keys whose value is positive."""

LLM_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")


def config_faults(cfg: ConfigContainer) -> list[Fault]:
    """Faults of values, modules, layout, placement and batch, each with its key and numbers."""
    sizes = list(_size_faults(cfg))
    # Divisibility means nothing for sizes below 1.
    found = sizes or list(layout.faults(cfg))
    found += _picture_faults(cfg, found)
    known = {fault.key for fault in found}
    others = (*_value_faults(cfg), *_freeze_faults(cfg), *_demo_faults(cfg))
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


def _picture_faults(cfg: ConfigContainer, found: list[Fault]) -> list[Fault]:
    """Encoders whose picture alone is longer than a sequence, among those that can be built."""
    faults = []
    for name, module in cfg.encoders.items():
        parts = (f"modules.{name}.encoder", f"modules.{name}.projector")
        if any(fault.key.startswith(parts) for fault in found):
            continue
        size = module.encoder.image_size
        tokens = num_tokens(module.encoder, module.projector, size, size)
        if tokens > cfg.data.sequence_length > 0:
            faults.append(
                Fault(
                    "data.sequence_length",
                    f"one picture takes {tokens} tokens of modules.{name} ({size} x {size} pixels, patches of "
                    f"{module.encoder.patch_size}, merge {module.projector.merge}), a sequence has only "
                    f"{cfg.data.sequence_length}: raise it above {tokens}, or raise modules.{name}.projector.merge",
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
    for key in ("optim.beta1", "optim.beta2"):
        if not 0 <= _value(cfg, key) < 1:
            yield Fault(key, f"must be at least 0 and below 1, is {_value(cfg, key)}")
    optim = cfg.optim
    if 0 <= optim.lr < optim.min_lr:
        yield Fault("optim.min_lr", f"must be at most optim.lr {optim.lr}, is {optim.min_lr}")
    if cfg.data.demo and not cfg.data.shards:
        yield Fault("data.shards", f"data.demo={cfg.data.demo} needs a folder to make the shards in, is empty")


def _freeze_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    for name, module in cfg.modules.items():
        parts = ("llm",) if name == LANGUAGE else ("encoder", "projector")
        for entry in module.freeze:
            if entry in PARTS and entry not in parts:
                yield Fault(
                    f"modules.{name}.freeze", f"{entry!r} is no part of this module, it has {' and '.join(parts)}"
                )
    if LANGUAGE in cfg.modules and all(
        set(module.freeze) >= ({"llm"} if name == LANGUAGE else {"encoder", "projector"})
        for name, module in cfg.modules.items()
    ):
        yield Fault(
            f"modules.{LANGUAGE}.freeze", "every part of every module is frozen: nothing to train; free at least one"
        )


def _demo_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Making a demo replaces every *.tar of its two folders: never where other shards stand."""
    demo, shards = cfg.data.demo, Path(cfg.data.shards)
    if demo not in ("digits", "text") or not cfg.data.shards:
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
