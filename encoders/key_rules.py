"""The values that a config key accepts, declared next to its default."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, get_origin

RULES = "rules"
"""Key of a field's metadata."""

MOST = 2**31 - 1
"""Largest integer of a key without another bound, which counters and sizes of libraries can hold."""

LARGEST = 1e30
"""Largest magnitude of a float key without another bound. Its square is finite in double precision, and it is finite in
single precision."""

MOST_LAYERS, MOST_WIDTH, MOST_PIXELS = 10_000, 2**22, 2**16
"""Bounds of layers, of heads and widths, and of the pixels of a side. Larger values are mistakes."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The values that a key accepts. None is not checked. Texts have no control characters, which a terminal would
    interpret. Numbers are finite, and within `MOST` or `LARGEST` unless another bound is set."""

    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    zero_means: str = ""
    """Meaning of 0 if it is a special value; for the message."""
    filled: str = ""
    """Content of a text that may not be empty; for the message."""

    def complaint(self, value: Any) -> str:
        """Return the error of a value, or an empty text. Bounds apply to every number in a list or mapping."""
        if value is None:
            return ""
        if self.choices:
            wrong = [item for item in (value if isinstance(value, list) else [value]) if item not in self.choices]
            choices = " or ".join(choice or "empty" for choice in self.choices)
            return f"must be {choices}, {'has' if isinstance(value, list) else 'is'} {wrong[0]!r}" if wrong else ""
        if self.filled and not str(value).strip():
            return f"is empty. Set it to {self.filled}"
        has = isinstance(value, list | tuple | dict)
        for leaf in _leaves(value):
            if isinstance(leaf, str) and any(not char.isprintable() and char not in "\n\t" for char in leaf):
                return f"must have no control characters, {'has' if has else 'is'} {leaf!r}"
            if isinstance(leaf, bool) or not isinstance(leaf, int | float):
                continue
            if isinstance(leaf, float) and not math.isfinite(leaf):
                return f"must be finite, {'has' if has else 'is'} {leaf}"
            if not self.holds(leaf):
                zero = f" (0: {self.zero_means})" if self.zero_means else ""
                widest = f"between {-LARGEST:g} and {LARGEST:g}" if isinstance(leaf, float) else f"at most {MOST}"
                bounds = widest if self._is_inside(leaf) else self.bounds()
                return f"must be {bounds}{zero}, {'has' if has else 'is'} {shown(leaf)}"
        return ""

    def holds(self, number: float) -> bool:
        """True if a finite number is in the range."""
        widest = LARGEST if isinstance(number, float) else MOST
        return self._is_inside(number) and abs(number) <= max(widest, self.at_most or 0, self.below or 0)

    def _is_inside(self, number: float) -> bool:
        """True if a number is within the declared bounds."""
        low = (self.at_least is None or number >= self.at_least) and (self.above is None or number > self.above)
        return low and (self.at_most is None or number <= self.at_most) and (self.below is None or number < self.below)

    def bounds(self) -> str:
        """Return the range of a number in words; empty if it has none."""
        bounds = {"at least": self.at_least, "above": self.above, "below": self.below, "at most": self.at_most}
        return " and ".join(f"{name} {shown(bound)}" for name, bound in bounds.items() if bound is not None)


_NO_RULES = Rules()


def key(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None, **rules: Any) -> Any:
    """Return a dataclass field with its default (or the `factory` of one) and the `Rules` of its values."""
    metadata = {RULES: Rules(**rules)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class FixedKeys:
    """Base of config dataclasses: setting an attribute that is not a key raises an AttributeError."""

    if not TYPE_CHECKING:  # type checkers still report unknown names

        def __setattr__(self, name, value):
            if name not in type(self).__dataclass_fields__:
                raise AttributeError(unknown_key(type(self), name))
            super().__setattr__(name, value)


def unknown_key(section: type, name: str) -> str:
    """Return a sentence that names the nearest keys of a dataclass."""
    keys = [field.name for field in dataclasses.fields(section)]
    return f"{section.__name__} has no key {name!r}. {nearest(name, keys)}"


def near_names(word: str, choices: Iterable[str]) -> list[str]:
    """Return up to three of `choices` that are spelled like `word`, those that it contains first."""
    near = difflib.get_close_matches(word, list(choices), n=3, cutoff=0.5)
    return sorted(near, key=lambda choice: choice not in word)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a sentence that names the nearest of `choices`, or all of them if none is near; empty without choices."""
    choices = list(choices)
    near = near_names(word, choices)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Choose from {', '.join(choices)}" if choices else ""


def rules_of(field: dataclasses.Field) -> Rules:
    """Return the rules of a field. Without rules, every finite number of a reasonable size is allowed."""
    return field.metadata.get(RULES, _NO_RULES)


def complaints(section: Any) -> list[tuple[str, str]]:
    """Return (field, message) of every value of a dataclass that its rules reject, without nested dataclasses."""
    sentences = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if get_origin(field.type) is list and isinstance(value, str):  # set in Python: its items are letters
            sentence = f"must be a list, is {value!r}. Write [{value!r}]"
        else:
            sentence = rules_of(field).complaint(value)
        if sentence:
            sentences.append((field.name, sentence))
    return sentences


def shown(value: Any) -> str:
    """Return a number as people write it."""
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _leaves(value: Any) -> list[Any]:
    """Return the values nested in lists and mappings, keys of mappings included."""
    if isinstance(value, dict):
        return [leaf for pair in value.items() for item in pair for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
