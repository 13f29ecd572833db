"""Config keys with checks: the accepted values are declared beside the default. Imports no torch."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from mimo_train.config.fault import Fault

_RULES = "rules"


@dataclasses.dataclass(frozen=True)
class Rules:
    """The values that a key accepts. Unset bounds allow everything; a value of None is not checked."""

    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    zero_means: str = ""
    """Meaning of 0 where it is a special value; for the message."""

    def complaint(self, value: Any) -> str:
        """What is wrong with a value; empty if nothing is."""
        if value is None:
            return ""
        if self.choices and value not in self.choices:
            return f"must be {' or '.join(choice or 'empty' for choice in self.choices)}, is {value!r}"
        low = self.at_least is not None and value < self.at_least
        if low or (self.above is not None and value <= self.above) or (self.below is not None and value >= self.below):
            zero = f" (0: {self.zero_means})" if self.zero_means else ""
            return f"must be {self.bounds()}{zero}, is {shown(value)}"
        return ""

    def bounds(self) -> str:
        """The range of a number in words; empty if it has none."""
        bounds = {"at least": self.at_least, "above": self.above, "below": self.below}
        return " and ".join(f"{name} {shown(bound)}" for name, bound in bounds.items() if bound is not None)


def key(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None, **rules: Any) -> Any:
    """A dataclass field with its default (or the `factory` of one) and the `Rules` of its values."""
    metadata = {_RULES: Rules(**rules)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def rules_of(field: dataclasses.Field) -> Rules:
    """The rules of a field; one that has none allows everything."""
    return field.metadata.get(_RULES, Rules())


def value_faults(section: Any, prefix: str) -> Iterator[Fault]:
    """Values of a section that its keys do not accept; no key accepts a number that is not finite.

    Args:
        section: a dataclass; nested sections are not checked.
        prefix: the section's key.
    """
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        complaint = _not_finite(value) or rules_of(field).complaint(value)
        if complaint:
            yield Fault(f"{prefix}.{field.name}", complaint)


def changed_fields(section: Any) -> list[str]:
    """Names of a section's fields that do not have their defaults."""
    changed = []
    for field in dataclasses.fields(section):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if getattr(section, field.name) != default:
            changed.append(field.name)
    return changed


def _not_finite(value: Any) -> str:
    """What is wrong with infinities and NaN, which pass any comparison; empty if there are none. Looks into lists and
    dicts."""
    if isinstance(value, dict):
        value = [*value.values()]
    has = isinstance(value, (list, tuple))
    strange = [one for one in (value if has else [value]) if isinstance(one, float) and not math.isfinite(one)]
    return f"must be finite, {'has' if has else 'is'} {strange[0]}" if strange else ""


def shown(value: Any) -> str:
    """A number as people write it."""
    return f"{value:g}" if isinstance(value, float) else f"{value}"
