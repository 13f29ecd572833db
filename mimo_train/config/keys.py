"""Faults of keys whose accepted values are declared next to their defaults (`encoders.key_rules`)."""

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from encoders.key_rules import FixedKeys, Rules, complaints, key, rules_of, shown, unknown_key
from mimo_train.config.errors import Fault

__all__ = ["Rules", "Section", "changed_fields", "key", "rules_of", "shown", "value_faults"]


class Section(FixedKeys):
    """Base of the sections of a config. Reading or setting an unknown key raises an error with the nearest keys."""

    if not TYPE_CHECKING:  # type checkers still report unknown names

        def __getattr__(self, name):
            raise AttributeError(unknown_key(type(self), name))


def value_faults(section: Any, prefix: str) -> Iterator[Fault]:
    """Yield the values of a section that its keys do not accept; no key accepts a number that is not finite. `section`:
    a dataclass, whose nested sections are not checked; `prefix`: its key."""
    before = f"{prefix}." if prefix else ""
    yield from (Fault(f"{before}{name}", sentence) for name, sentence in complaints(section))


def changed_fields(section: Any) -> list[str]:
    """Return the names of a section's fields that differ from their defaults."""
    changed = []
    for field in dataclasses.fields(section):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if getattr(section, field.name) != default:
            changed.append(field.name)
    return changed


def is_installed(module: str) -> bool:
    """True if a module of this name can be imported."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent package is missing
        return False
    # A folder of that name in the working directory is found too, without an origin.
    return spec is not None and spec.origin is not None
