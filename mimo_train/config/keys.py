"""Faults of keys whose accepted values are declared beside their defaults (`encoders.ranges`). Imports no torch."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from encoders.ranges import FixedKeys, Rules, complaints, key, rules_of, shown, unknown_key
from mimo_train.config.fault import Fault

__all__ = ["Rules", "Section", "changed_fields", "key", "rules_of", "shown", "value_faults"]


class Section(FixedKeys):
    """Base of the sections of a config. Reading or setting an unknown key raises an error with the nearest keys."""

    if not TYPE_CHECKING:  # type checkers still report unknown names

        def __getattr__(self, name):
            raise AttributeError(unknown_key(type(self), name))


def value_faults(section: Any, prefix: str) -> Iterator[Fault]:
    """Values of a section that its keys do not accept; no key accepts a number that is not finite.

    Args:
        section: a dataclass; nested sections are not checked.
        prefix: the section's key.
    """
    before = f"{prefix}." if prefix else ""
    yield from (Fault(f"{before}{name}", sentence) for name, sentence in complaints(section))


def changed_fields(section: Any) -> list[str]:
    """Names of a section's fields that do not have their defaults."""
    changed = []
    for field in dataclasses.fields(section):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if getattr(section, field.name) != default:
            changed.append(field.name)
    return changed
