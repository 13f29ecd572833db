"""Faults of the optimizer: settings of single modules, stages of freezing, loss scaling, overlap. Imports no torch."""

from collections.abc import Iterator
from dataclasses import fields

from mimo_train.check.frozen import parts_of
from mimo_train.config.schema import LANGUAGE, ConfigContainer, Fault, ModuleConfig
from mimo_train.plan.memory import PARTS

DECAYS = ("cosine", "linear", "constant")
"""Values of `optim.decay`."""


def optim_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Faults of `optim`, `modules.NAME.optim` and `modules.NAME.freeze_until` that are no matter of single values."""
    yield from _precision_faults(cfg)
    for name, module in cfg.modules.items():
        yield from _module_faults(cfg, name, module)
        yield from _stage_faults(name, module)
    yield from _nothing_to_train(cfg)
    optim = cfg.optim
    if optim.overlap_param_gather and not optim.distributed_optimizer:
        yield Fault(
            "optim.overlap_param_gather",
            "without optim.distributed_optimizer no parameters are gathered: set it to true, or "
            "optim.overlap_param_gather=false",
        )
    elif optim.overlap_param_gather and not optim.overlap_grad_reduce:
        yield Fault(
            "optim.overlap_param_gather",
            "needs optim.overlap_grad_reduce, which is false: set it to true, or optim.overlap_param_gather=false",
        )


def _precision_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    optim = cfg.optim
    for key in ("initial_loss_scale", "min_loss_scale"):
        if getattr(optim, key) <= 0:
            yield Fault(f"optim.{key}", f"must be above 0, is {getattr(optim, key):g}")
    if 0 < optim.initial_loss_scale < optim.min_loss_scale:
        yield Fault(
            "optim.initial_loss_scale",
            f"must be at least optim.min_loss_scale {optim.min_loss_scale:g}, is {optim.initial_loss_scale:g}",
        )
    if optim.loss_scale < 0:
        yield Fault("optim.loss_scale", f"must be at least 0 (0: dynamic), is {optim.loss_scale:g}")
    elif optim.loss_scale and cfg.train.precision != "fp16":
        yield Fault(
            "optim.loss_scale",
            f"is {optim.loss_scale:g}, but only fp16 scales losses and train.precision is {cfg.train.precision}: "
            "leave it at 0",
        )
    if optim.loss_scale_window < 1:
        yield Fault("optim.loss_scale_window", f"must be at least 1, is {optim.loss_scale_window}")


def _module_faults(cfg: ConfigContainer, name: str, module: ModuleConfig) -> Iterator[Fault]:
    own, key = module.optim, f"modules.{name}.optim"
    for field in fields(own):
        value = getattr(own, field.name)
        if field.name == "decay":
            if value is not None and value not in DECAYS:
                yield Fault(f"{key}.decay", f"must be {' or '.join(DECAYS)}, is {value!r}")
        elif value is not None and value < 0:
            yield Fault(f"{key}.{field.name}", f"must be at least 0, is {value}")
    if own.projector_lr is not None and name == LANGUAGE:
        yield Fault(f"{key}.projector_lr", "the language model has no projector: set it at the encoder's module")
    if (own.decay or cfg.optim.decay) == "constant":
        return
    least_key = f"{key}.min_lr" if own.min_lr is not None else "optim.min_lr"
    least = cfg.optim.min_lr if own.min_lr is None else own.min_lr
    peaks = {"lr": cfg.optim.lr if own.lr is None else own.lr, "projector_lr": own.projector_lr}
    for field, peak in peaks.items():
        set_here = own.min_lr is not None or getattr(own, field) is not None
        if set_here and peak is not None and 0 <= peak < least:
            yield Fault(
                f"{key}.{field if getattr(own, field) is not None else 'min_lr'}",
                f"a rate of {peak:g} would rise to {least_key} {least:g} at the end: set {key}.min_lr to at most "
                f"{peak:g}",
            )


def _stage_faults(name: str, module: ModuleConfig) -> Iterator[Fault]:
    parts, key = parts_of(name), f"modules.{name}.freeze_until"
    for entry, step in module.freeze_until.items():
        if entry in PARTS and entry not in parts:
            yield Fault(key, f"{entry!r} is no part of this module, it has {' and '.join(parts)}")
        if step < 0:
            yield Fault(key, f"{entry}: {step} is no step: give the number of steps without training it, 0 or more")
        if entry in module.freeze:
            yield Fault(key, f"{entry!r} stands in modules.{name}.freeze too, which holds for the whole run: drop one")


def _nothing_to_train(cfg: ConfigContainer) -> Iterator[Fault]:
    """A first step without anything to train; parts are only released, so that no later step is worse."""
    first: list[tuple[int, str]] = []
    for name, module in cfg.modules.items():
        whole = module.freeze_until.get("*", 0)
        for part in parts_of(name):
            until = max(whole, module.freeze_until.get(part, 0))
            if part in module.freeze:
                continue
            if until <= 0:
                return
            first.append((until, name))
    if first:
        step, name = min(first)
        yield Fault(
            f"modules.{name}.freeze_until",
            f"nothing is trained in the first {step} steps: train at least one part from the start",
        )
