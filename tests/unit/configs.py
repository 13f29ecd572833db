"""Runs for unit tests, without composing the same one twice: composing takes a tenth of a second."""

import copy
import functools
from typing import Any

from mimo_train.config.compose import load as compose_load
from mimo_train.config.schema import ConfigContainer

SIZES = {
    "encoder@modules.images.encoder": {
        "modules.images.encoder.patch_size": 12,
        "modules.images.encoder.hidden_size": 64,
        "modules.images.encoder.num_layers": 3,
        "modules.images.encoder.num_attention_heads": 4,
        "modules.images.encoder.ffn_hidden_size": 256,
    },
    "llm@modules.language.llm": {
        "modules.language.llm.num_layers": 4,
        "modules.language.llm.hidden_size": 96,
        "modules.language.llm.num_attention_heads": 4,
        "modules.language.llm.ffn_hidden_size": 256,
    },
    "data": {"data.sequence_length": 96},
    "train": {"train.global_batch_size": 32, "train.iters": 800},
}
"""Sizes of `vlm_digits` that the numbers expected by tests follow from, so that tuning the demo changes no test; by
the group whose choice sets them aside."""


def load(config: str, *overrides: str, without_data: bool = False) -> ConfigContainer:
    """`compose.load`, once for each set of arguments; the result is the caller's own."""
    return copy.deepcopy(_composed(config, overrides, without_data))


def changed(values: dict[str, Any], config: str = "vlm_digits") -> ConfigContainer:
    """A shipped run with other values, by dotted key and without checks of type."""
    cfg = load(config)
    for key, value in values.items():
        *path, field = key.split(".")
        at = cfg
        for name in path:
            at = at[name] if isinstance(at, dict) else getattr(at, name)
        if isinstance(at, dict):
            at[field] = value
        else:
            setattr(at, field, value)
    return cfg


@functools.lru_cache
def _composed(config: str, overrides: tuple[str, ...], without_data: bool = False) -> ConfigContainer:
    chosen = {override.partition("=")[0] for override in overrides}
    sizes = {group: values for group, values in SIZES.items() if config == "vlm_digits" and group not in chosen}
    base = [f"{key}={value}" for values in sizes.values() for key, value in values.items()]
    return compose_load(config, [*base, *overrides], without_data=without_data)
