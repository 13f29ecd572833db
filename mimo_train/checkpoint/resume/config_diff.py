"""Config changes since the checkpoint: those that affect results, and those that make it another model.

All keys of `data`, `modules`, `train`, `optim`, `preference` and `distill`, including future ones, are compared unless
they are listed here.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Set
from typing import Any

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.hub import named
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_modules import LoraConfig, ModuleConfig

REFUSED = {
    "data": {
        *("shuffle", "shuffle_block"),  # the order of samples
        *("fields", "null_captions", "background", "video", "blind", "separate_documents"),  # their content
    },
    "modules": {"freeze_until"},
    "optim": {"name"},
}
"""Keys by section that `same_run` rejects if they change. Keys of `encoder`, `projector`, `llm` and `lora` are rejected
too, except `MAY_CHANGE`."""

BY_CONTENT = {
    # Fingerprints of shards, texts and weights of sources are compared, because a folder may move.
    "data": {
        *("shards", "mix", "demo", "validation_fraction"),
        *("tokenizer", "chat_template", "template_variables", "special_tokens_in_text"),
    },
    "modules": {"placeholder"},
}
"""Keys by section that are rejected if they change samples or texts."""

FREE = {
    "data": {
        *("pad", "pack", "pack_length"),  # the arrangement of the same samples in rows
        *("workers", "read_retries", "cache_dir", "cache_bytes", "max_bad_samples"),
    },
    "modules": {
        *("layout", "recompute", "offload_activations", "balance", "prefetch_microbatches", "feature_cache", "compile"),
        "pretrained",  # weights of a new run; what it fills in is compared
    },
    "train": {
        *("micro_batch_size", "recompute", "offload_activations", "logits", "max_logits_mib", "manual_gc_interval"),
        *("eval_interval", "eval_metrics", "eval_max_new_tokens", "report_samples", "log_interval"),  # reporting
        *("exit_interval", "exit_duration_minutes", "max_empty_steps", "on_nan", "rerun", "stop_early"),  # stopping
        *("compile", "fusions"),
    },
    "optim": {"distributed_optimizer", "offload", "overlap_grad_reduce", "overlap_param_gather"},
    "distill": {"layout", "first_rank"},
}
"""Keys by section that change no number except by summation order."""

BY_MODULE = {"train": {"fp8"}, "modules": {"fp8"}}
"""Keys by section that are compared by each module's effective value."""

BY_MICROBATCH = {"data": {"pad", "pack", "pack_length"}, "modules": {"layout"}, "train": {"micro_batch_size"}}
"""Keys of `FREE` that change numbers of experts whose loads are balanced over a microbatch of ranks, and the KL term of
`kto`."""

FREE_OF_SPECS = {"name", "init_std", "max_positions"}
"""Keys of `MAY_CHANGE` that change no number of a run that has weights."""


def initial_weights(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the initial weights of a new run, as key -> value, from a config in record form."""
    checkpoint = config["checkpoint"]
    weights = {"checkpoint.weights": checkpoint.get("weights")}
    for name, load in checkpoint.get("load_modules", {}).items():
        weights[f"checkpoint.load_modules.{name}.path"] = load.get("path")
    for name, module in config["modules"].items():
        weights[f"modules.{name}.pretrained"] = module.get("pretrained")
        weights[f"modules.{name}.lora.adapter"] = module.get("lora", {}).get("adapter")
    return {key: value for key, value in weights.items() if value}


def changed_numbers(before: Mapping[str, Any], cfg: ConfigContainer) -> Iterator[str]:
    """Yield a sentence with key, old and new value for each permitted change that affects numbers.

    Args:
        before: config from a checkpoint's record, without `same_run.resume_faults`.

    Raises:
        KeyError, TypeError, AttributeError: `before` is not a config.
    """
    for section in ("data", "train", "optim", "preference", "distill"):
        free = _unreported(section, cfg)
        yield from key_changes(before.get(section, {}), getattr(cfg, section), section, free)
    for index, (past, source) in enumerate(zip(before["data"].get("mix") or (), cfg.data.mix, strict=False)):
        if past.get("weight") != source.weight:
            yield f"data.mix[{index}].weight was {past.get('weight')}, is {source.weight}"
    reported = MAY_CHANGE - FREE_OF_SPECS
    for name, module in cfg.modules.items():
        was, prefix = before["modules"][name], f"modules.{name}"
        old, new = was.get("fp8") or before["train"].get("fp8", "none"), cfg.fp8_of(name)
        if old != new:
            yield f"{prefix}.fp8 was {old}, is {new}"
        for part in (*SPECS, "lora"):
            section = getattr(module, part)
            if section is not None:
                others = {key for key in (*vars(section), *(was.get(part) or {})) if key not in reported}
                yield from key_changes(was.get(part) or {}, section, f"{prefix}.{part}", others)
        yield from key_changes(was, module, prefix, _unreported("modules", cfg) | FREE["optim"] | {*SPECS, "lora"})


def _unreported(section: str, cfg: ConfigContainer) -> set[str]:
    """Return the keys of a section that are rejected, change nothing, or are compared elsewhere."""
    keys = {key for kind in (REFUSED, BY_CONTENT, FREE, BY_MODULE) for key in kind.get(section, ())}
    by_microbatch = cfg.llm.balances_microbatches or cfg.traits.form == "labels"
    return keys - BY_MICROBATCH.get(section, set()) if by_microbatch else keys


def key_changes(was: Mapping[str, Any], section: Any, prefix: str, free: Set[str] = frozenset()) -> Iterator[str]:
    """Yield a sentence with key, old and new value for each difference, also in nested sections, lists and mappings.

    Args:
        was: section from a record. A key that it lacks was added later and means its default.
        free: key names to skip at any depth.
    """
    now, default = plain(section), _plain_defaults(type(section))
    for name in now:
        old, value = was.get(name, default.get(name)), getattr(section, name)
        if name in free:
            continue
        yield from _changes(old, value, now[name], f"{prefix}.{name}", free)
    for name in was.keys() - now.keys() - free:
        yield f"{prefix}.{name} was {was[name]}, and is no key of this version"


def _changes(old: Any, value: Any, now: Any, key: str, free: Set[str]) -> Iterator[str]:
    """Yield sentences about a value: `old` from the record, `value` now, and `now` in record form."""
    if dataclasses.is_dataclass(value) and isinstance(old, dict):
        yield from key_changes(old, value, key, free)
    elif isinstance(value, list | dict) and type(old) is type(value) and _has_sections(value, old):
        before, after, plain_after = (_entries(each) for each in (old, value, now))
        for name in {**before, **after}:
            if name not in after:
                yield f"{key}{name} was {before[name]}, and is gone"
            elif name not in before:
                yield f"{key}{name} is new: {plain_after[name]}"
            else:
                yield from _changes(before[name], after[name], plain_after[name], f"{key}{name}", free)
    elif old != now:
        yield f"{key} was {old}, is {now}"


def _entries(value: list[Any] | dict[Any, Any]) -> dict[str, Any]:
    """Return the entries of a list or mapping by the ends of their keys."""
    if isinstance(value, list):
        return {f"[{index}]": item for index, item in enumerate(value)}
    return {f".{name}": item for name, item in value.items()}


def _has_sections(value: list[Any] | dict[Any, Any], old: list[Any] | dict[Any, Any]) -> bool:
    """True if a list or mapping has sections; if it is empty now, its record decides."""
    if not value:
        return any(isinstance(item, dict) for item in _entries(old).values())
    return any(map(dataclasses.is_dataclass, _entries(value).values()))


def plain(section: Any) -> dict[str, Any]:
    """Return a dataclass in record form: tuples become lists, numeric keys text, folders of the hub's cache names."""
    return named(json.loads(json.dumps(dataclasses.asdict(section))))


def _plain_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a section's keys, if they have one."""
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            defaults[field.name] = plain(value) if dataclasses.is_dataclass(value) else value
    return json.loads(json.dumps(defaults))


MAY_CHANGE = {
    "name",
    "dropout",
    "init_std",
    "max_positions",
    "max_seconds",
    "router_aux_loss",
    "router_balancing",
    "router_z_loss",
}
"""Keys that neither shape nor interpret weights: a resumed run may change them."""

MAY_CHANGE_IN_A_NEW_RUN = MAY_CHANGE | {
    "image_size",
    "max_pixels",
    "min_pixels",
    "reads_videos",
    "resize",
    "rope_base",
    "rope_scaling",
    "sound",
    "video",
}
"""Keys that a new run may change for its initial weights: larger images, longer texts, videos."""

SPECS = ("encoder", "projector", "llm")
"""Keys of a module's parts."""


def model_changes(before: Mapping[str, Any], now: ConfigContainer, *, new_run: bool = False) -> Iterator[str]:
    """Yield a sentence with key, old and new value for each difference between models.

    Args:
        before: config of the weights, from a checkpoint's record. A key that it lacks was added later and means its
            default.
        now: config that requests them.
        new_run: True if only weights are taken (`checkpoint.weights`): modules may be left out, and adapters added.

    Raises:
        KeyError, TypeError, AttributeError: `before` is not a config.
    """
    modules: Mapping[str, Any] = before["modules"]
    misfit = _other_modules(list(modules), list(now.modules), new_run)
    if misfit:
        yield misfit
        return
    free = MAY_CHANGE_IN_A_NEW_RUN if new_run else MAY_CHANGE
    for name, module in now.modules.items():
        yield from _spec_changes(modules[name], module, f"modules.{name}", free)
        yield from _adapter_changes(modules[name].get("lora") or {}, module, f"modules.{name}.lora", new_run)
    length = before.get("data", {}).get("sequence_length", DataConfig().sequence_length)
    llm = now.language.llm
    if isinstance(llm, LlmSpec) and llm.position == "learned" and length != now.data.sequence_length:
        yield f"data.sequence_length was {length}, is {now.data.sequence_length}, with learned positions"


def module_changes(before: Mapping[str, Any], source: str, now: ModuleConfig, prefix: str) -> Iterator[str]:
    """Yield sentences like `model_changes`, about one module whose weights a new run takes.

    Args:
        before: config of the weights.
        source: name of the module there.
        prefix: key of the module here.

    Raises:
        KeyError, TypeError, AttributeError: `before` is not a config, or has no such module.
    """
    was = before["modules"][source]
    yield from _spec_changes(was, now, prefix, MAY_CHANGE_IN_A_NEW_RUN)
    yield from _adapter_changes(was.get("lora") or {}, now, f"{prefix}.lora", True)


def _other_modules(before: list[str], now: list[str], new_run: bool) -> str:
    """Return how the modules differ. Their order matters: it numbers and joins the tokens of their media."""
    encoders, left = [name for name in now if name != LANGUAGE], [name for name in before if name != LANGUAGE]
    if new_run and encoders:
        left = [name for name in left if name in encoders]
    if encoders == left:
        return ""
    order = " in this order" if sorted(encoders) == sorted(left) else ""
    return f"modules were {', '.join(before)}, are {', '.join(now)}{order}"


def _spec_changes(before: Mapping[str, Any], module: ModuleConfig, prefix: str, free: Set[str]) -> Iterator[str]:
    for part in SPECS:
        was, spec = before.get(part), getattr(module, part)
        if (was is None) != (spec is None):
            yield f"{prefix}.{part} {'was not there' if was is None else 'is gone'}"
        elif was is not None and was.get("family", "") != getattr(spec, "family", ""):
            yield f"{prefix}.{part}.family was {was.get('family')}, is {getattr(spec, 'family', None)}"
        elif was is not None:
            # Records from before a native encoder read videos do not have its directory.
            yield from key_changes(was, spec, f"{prefix}.{part}", free | ({"path", "pad"} - was.keys()))


def _adapter_changes(was: Mapping[str, Any], module: ModuleConfig, prefix: str, new_run: bool) -> Iterator[str]:
    before, now = was.get("rank", LoraConfig().rank), module.lora.rank
    if not before and (not now or new_run):
        if module.lora.quantization:
            text = "but its weights are not in 4 bits. Export it, and start from that directory by pretrained"
            yield f"{prefix}.quantization is {module.lora.quantization}, {text}"
        return
    if before and not now:
        yield f"{prefix}.rank was {before}, is 0, so that its adapters would be lost"
        return
    more = new_run and set(was.get("targets", ())) <= set(module.lora.targets)
    free = {"adapter"} | ({"targets"} if more else set()) | ({"modules_to_save"} if new_run else set())
    yield from key_changes(was, module.lora, prefix, MAY_CHANGE | free)
