"""What a run that continues from a checkpoint does otherwise than before, so that its numbers are others from there on.
Imports no torch.

Every key of `data`, `modules`, `train` and `optim` is compared, also those that are added to them some day, but for
those that are named here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mimo_train.checkpoint.resume.key_diff import key_changes
from mimo_train.checkpoint.resume.model_diff import MAY_CHANGE, SPECS
from mimo_train.config.compose import to_dict
from mimo_train.config.schema import ConfigContainer

REFUSED = {
    "data": {
        *("shuffle", "shuffle_block"),  # the order of samples
        *("fields", "null_captions", "background", "video", "blind", "separate_documents"),  # what they are
    },
    "modules": {"freeze_until"},
}
"""Keys by section of which another value is a fault by itself (`mimo_train.checkpoint.resume.same_run`); of `encoder`,
`projector`, `llm` and `lora` every key is, but for those of `model_changes.MAY_CHANGE`."""

BY_CONTENT = {
    # A folder may move, and what it holds must stay: fingerprints of shards, texts and weights of sources are compared.
    "data": {
        *("shards", "mix", "demo", "validation_fraction"),
        *("tokenizer", "chat_template", "template_variables", "special_tokens_in_text"),
    },
    "modules": {"placeholder"},
}
"""Keys by section of which another value is a fault where it gives other samples or texts."""

FREE = {
    "data": {
        *("pad", "pack", "pack_length"),  # how the same samples stand in rows
        *("workers", "read_retries", "cache_dir", "cache_bytes", "max_bad_samples"),
        "mix_new_weights",  # it asks for the weights that it lets pass
    },
    "modules": {
        *("layout", "recompute", "balance", "prefetch_microbatches", "feature_cache", "compile"),
        "pretrained",  # weights of a new run; what it fills in is compared
    },
    "train": {
        *("micro_batch_size", "recompute", "logits", "manual_gc_interval"),
        *("eval_interval", "report_samples", "log_interval"),  # when it is looked at, and what is shown
        *("exit_interval", "exit_duration_minutes", "max_empty_steps", "on_nan", "rerun"),  # when it stops
        "compile",
    },
    "optim": {"distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"},
}
"""Keys by section that change no number, but for the order in which numbers are summed."""

BY_MODULE = {"train": {"fp8"}, "modules": {"fp8"}}
"""Keys by section of which the value that a module has is compared, wherever it is given."""

BY_MICROBATCH = {"data": {"pad", "pack", "pack_length"}, "modules": {"layout"}, "train": {"micro_batch_size"}}
"""Keys by section of `FREE` that change numbers of experts whose loads are balanced over a microbatch of ranks."""

FREE_OF_SPECS = {"name", "init_std", "max_positions"}
"""Of `model_changes.MAY_CHANGE`, those that change no number of a run that has weights."""


BEGAN = "began_with"
"""Entry of a checkpoint's record: the weights that the first start of its run began with."""


def begun_with(config: Mapping[str, Any]) -> dict[str, str]:
    """The weights that a new run of a config, as a record holds it, begins with: key -> what is given there."""
    checkpoint = config["checkpoint"]
    found = {"checkpoint.weights": checkpoint.get("weights")}
    for name, load in checkpoint.get("load_modules", {}).items():
        found[f"checkpoint.load_modules.{name}.path"] = load.get("path")
    for name, module in config["modules"].items():
        found[f"modules.{name}.pretrained"] = module.get("pretrained")
        found[f"modules.{name}.lora.adapter"] = module.get("lora", {}).get("adapter")
    return {key: value for key, value in found.items() if value}


def unread_weights(record: Mapping[str, Any], cfg: ConfigContainer) -> Iterator[str]:
    """Weights, as key=value, that this run is told to begin with, its first start was not, and it does not read, since
    it continues.

    Args:
        record: of the checkpoint that it continues from.
    """
    if record["config"]["checkpoint"].get("trained_only"):
        return  # then they are read again, and compared
    began = began_with(record)
    for key, value in begun_with(to_dict(cfg)).items():
        if value != began.get(key):
            yield f"{key}={value}"


def began_with(record: Mapping[str, Any]) -> dict[str, str]:
    """`begun_with` of the first start of the run of a checkpoint. Its config is that of the start that saved it, and
    all that is known where the record is of before `BEGAN` was there."""
    return record[BEGAN] if BEGAN in record else begun_with(record["config"])


def changed_numbers(before: Mapping[str, Any], cfg: ConfigContainer) -> Iterator[str]:
    """Sentences with key, old and new value, one for each key that is not the same and may be another one.

    Args:
        before: the config of a checkpoint, as its record holds it, of which `same_run.resume_faults` finds none.

    Raises:
        KeyError, TypeError, AttributeError: `before` is no config.
    """
    for section in ("data", "train", "optim"):
        free = _passed_over(section, cfg)
        yield from key_changes(before.get(section, {}), getattr(cfg, section), section, free)
    for at, (past, source) in enumerate(zip(before["data"].get("mix") or (), cfg.data.mix, strict=False)):
        if past.get("weight") != source.weight:
            yield f"data.mix[{at}].weight was {past.get('weight')}, is {source.weight}"
    said = MAY_CHANGE - FREE_OF_SPECS
    for name, module in cfg.modules.items():
        was, prefix = before["modules"][name], f"modules.{name}"
        old, new = was.get("fp8") or before["train"].get("fp8", "none"), cfg.fp8_of(name)
        if old != new:
            yield f"{prefix}.fp8 was {old}, is {new}"
        for part in (*SPECS, "lora"):
            section = getattr(module, part)
            if section is not None:
                others = {key for key in (*vars(section), *(was.get(part) or {})) if key not in said}
                yield from key_changes(was.get(part) or {}, section, f"{prefix}.{part}", others)
        yield from key_changes(was, module, prefix, _passed_over("modules", cfg) | {*SPECS, "lora"})


def _passed_over(section: str, cfg: ConfigContainer) -> set[str]:
    known = {key for kind in (REFUSED, BY_CONTENT, FREE, BY_MODULE) for key in kind.get(section, ())}
    return known - BY_MICROBATCH[section] if cfg.llm.balances_microbatches and section in BY_MICROBATCH else known
