"""Runs for unit tests, without composing the same one twice: composing takes a tenth of a second."""

import copy
import functools
from typing import Any

from mimo_train.compose import load as compose_load
from mimo_train.config import ConfigContainer


def load(config: str, *overrides: str) -> ConfigContainer:
    """`compose.load`, once for each set of arguments; the result is the caller's own."""
    return copy.deepcopy(_composed(config, overrides))


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
def _composed(config: str, overrides: tuple[str, ...]) -> ConfigContainer:
    return compose_load(config, overrides)
