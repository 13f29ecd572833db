"""The config that data are looked at with, where values of it have faults. Imports no torch."""

from dataclasses import replace
from typing import Any

from data.errors import DataError
from data.media.background import colour_of
from mimo_train.config.keys import value_faults
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig


def with_sound_values(cfg: ConfigContainer) -> ConfigContainer:
    """`cfg` with the defaults in the place of numbers and of the colour of `data` that cannot be, which no dataset
    takes: they have faults of their own, and hide none of the shards."""
    numbers = {name: default for name, default in vars(DataConfig()).items() if type(default) in (int, float)}
    sound: dict[str, Any] = {name: default for name, default in numbers.items() if _is_wrong(cfg, name)}
    try:
        colour_of(cfg.data.background)
    except DataError:
        sound["background"] = DataConfig().background
    return replace(cfg, data=replace(cfg.data, **sound))


def has_length(cfg: ConfigContainer) -> bool:
    """Whether samples can be of `data.sequence_length`: with another length none is read."""
    return not _is_wrong(cfg, "sequence_length")


def _is_wrong(cfg: ConfigContainer, name: str) -> bool:
    return any(fault.key == f"data.{name}" for fault in value_faults(cfg.data, "data"))
