"""Faults of what is frozen, and of what goes with it: adapters, cached and prefetched features. Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.schema import LANGUAGE, ConfigContainer, Fault, ModuleConfig
from mimo_train.config.schema_frozen import ADAPTED
from mimo_train.plan.memory import PARTS


def frozen_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Faults of `modules.NAME.freeze`, `lora`, `feature_cache` and `prefetch_microbatches`."""
    for name, module in cfg.modules.items():
        for entry in module.freeze:
            if entry in PARTS and entry not in parts_of(name):
                yield Fault(
                    f"modules.{name}.freeze",
                    f"{entry!r} is no part of this module, it has {' and '.join(parts_of(name))}",
                )
        yield from _lora_faults(name, module)
        yield from _cache_faults(name, module)
        yield from _prefetch_faults(name, module, cfg)
    if LANGUAGE in cfg.modules and all(
        set(module.freeze) >= set(parts_of(name)) for name, module in cfg.modules.items()
    ):
        yield Fault(
            f"modules.{LANGUAGE}.freeze", "every part of every module is frozen: nothing to train; free at least one"
        )


def parts_of(name: str) -> tuple[str, ...]:
    """What `freeze` can name of a module as a whole."""
    return ("llm",) if name == LANGUAGE else ("encoder", "projector")


def _lora_faults(name: str, module: ModuleConfig) -> Iterator[Fault]:
    lora, key = module.lora, f"modules.{name}.lora"
    if lora.rank < 0:
        yield Fault(f"{key}.rank", f"must be at least 0 (0: no adapters), is {lora.rank}")
    if lora.rank <= 0:
        return
    if lora.alpha <= 0:
        yield Fault(f"{key}.alpha", f"must be above 0, is {lora.alpha:g}")
    if not 0 <= lora.dropout < 1:
        yield Fault(f"{key}.dropout", f"must be at least 0 and below 1, is {lora.dropout:g}")
    unknown = [target for target in lora.targets if target not in ADAPTED]
    if unknown or not lora.targets:
        yield Fault(f"{key}.targets", f"must name some of {', '.join(ADAPTED)}, is {lora.targets}")
    whole = next((entry for entry in module.freeze if entry in (parts_of(name)[0], "*")), None)
    if whole:
        yield Fault(
            f"modules.{name}.freeze",
            f"{whole!r} freezes the adapters of {key}.rank {lora.rank} too: remove it, the other weights are frozen as "
            "it is",
        )
    experts = module.llm.num_experts if module.llm else 0
    of_experts = [target for target in lora.targets if target in ("linear_fc1", "linear_fc2")]
    if experts and of_experts:
        yield Fault(
            f"{key}.targets",
            f"{' and '.join(of_experts)} belong to the {experts} experts, which get no adapters: use "
            f"{key}.targets=[linear_qkv, linear_proj]",
        )


def _cache_faults(name: str, module: ModuleConfig) -> Iterator[Fault]:
    key = f"modules.{name}.feature_cache"
    if module.feature_cache.max_gigabytes <= 0:
        yield Fault(f"{key}.max_gigabytes", f"must be above 0, is {module.feature_cache.max_gigabytes:g}")
    if module.feature_cache.dir:
        why = _no_fixed_features(name, module)
        if why:
            yield Fault(f"{key}.dir", f"{why}, or leave it empty")


def _prefetch_faults(name: str, module: ModuleConfig, cfg: ConfigContainer) -> Iterator[Fault]:
    key, count = f"modules.{name}.prefetch_microbatches", module.prefetch_microbatches
    if count < 0:
        yield Fault(key, f"must be at least 0, is {count}")
    if count > 0:
        why = _no_fixed_features(name, module)
        if why:
            yield Fault(key, f"{why}, or set it to 0")
        elif cfg.placement.bridge != "planned":
            yield Fault(key, f"needs placement.bridge=planned, which is {cfg.placement.bridge}; or set it to 0")


def _no_fixed_features(name: str, module: ModuleConfig) -> str:
    """Why features of a sample are not the same throughout the run, and what to change; empty if they are."""
    if name == LANGUAGE:
        return "only encoders have features: remove it"
    if "encoder" not in module.freeze:
        return f"features change while the encoder is trained: set modules.{name}.freeze=[encoder]"
    if module.encoder.dropout > 0:
        return f"dropout changes features: set modules.{name}.encoder.dropout=0 (is {module.encoder.dropout:g})"
    if module.layout.pp > 1:
        return f"an encoder in one stage is needed: set modules.{name}.layout.pp=1 (is {module.layout.pp})"
    return ""
