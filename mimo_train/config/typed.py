"""From plain values to dataclasses, by the types of their fields; every value of another type is a fault with its
key."""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.text_format import shown_lines
from encoders.ranges import rules_of
from mimo_train.config.errors import Fault, unknown_key
from mimo_train.config.yaml_numbers import plain_numbers

LONGEST_SHOWN = 80
"""Characters of a value that a message repeats."""

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_EXAMPLES = {list: "a list, for example [a, b]", dict: "a mapping, for example {a: 1}", bool: "true or false"}
_WORDS = {int: "a whole number", float: "a number", str: "a text", **_EXAMPLES}


def structured(cls: type, plain: Any, prefix: str) -> tuple[Any, list[Fault]]:
    """An instance of the dataclass `cls`, and the faults of values that are of no use; these have their defaults in it.

    Args:
        plain: nested dicts and lists.
        prefix: the config key of the whole.
    """
    if not isinstance(plain, Mapping):
        return None, [Fault(prefix, f"must be a mapping of keys, is {shown_plain(plain)}")]
    hints, values, faults = _hints(cls), {}, []
    rules = {field.name: rules_of(field) for field in dataclasses.fields(cls)}
    for name, value in plain.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if name not in rules:
            faults.append(unknown_key(key.removesuffix(str(name)), str(name), rules))
            continue
        try:
            found, wrong = _value(hints.get(name, Any), value, key)
        except _Misfit as misfit:
            # YAML reads some words that people give for a choice as other values: yes, off, 1.
            of_choices = rules[name].complaint(value) if misfit.key == key and rules[name].choices else ""
            faults.append(Fault(misfit.key, of_choices or misfit.sentence))
        else:
            values[name] = found
            faults += wrong
    # A required field that is wrong has no default: its class is not built.
    required = {
        one.name
        for one in dataclasses.fields(cls)
        if one.init and one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - values.keys())
    faults += [Fault(f"{prefix}.{name}", "is missing: give it") for name in missing if name not in plain]
    return (None if missing else cls(**values)), faults


def shown_plain(value: Any) -> str:
    """A value as a message repeats it: in one line, not for ever."""
    text = shown_lines(repr(value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


class _Misfit(ValueError):
    """A value of another type than its field's."""

    def __init__(self, key: str, wanted: str, value: Any):
        self.key, self.wanted, self.sentence = key, wanted, f"must be {wanted}, is {shown_plain(value)}"
        super().__init__(self.sentence)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(wanted: Any, value: Any, key: str) -> tuple[Any, list[Fault]]:
    """The value as the type says, and faults of dataclasses in it. Raises _Misfit."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, value, key)
    if origin is typing.Literal:
        if value not in inner:
            raise _Misfit(key, " or ".join(map(str, inner)), value)
        return value, []
    kind = origin or wanted
    if value is None and kind not in (Any, type(None)):
        raise _Misfit(key, f"{_word(kind)} (or left away)", value)
    if kind in (list, tuple, set):
        if not isinstance(value, list | tuple):
            raise _Misfit(key, _WORDS[list], value)
        of = inner[0] if inner else Any
        found = [_value(of, one, f"{key}[{at}]") for at, one in enumerate(value)]
        return kind(one for one, _ in found), [fault for _, faults in found for fault in faults]
    if kind is dict:
        return _mapping(inner, value, key)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return structured(kind, value, key)
    return _scalar(kind, value, key), []


def _one_of(choices: tuple[Any, ...], value: Any, key: str) -> tuple[Any, list[Fault]]:
    if value is None and type(None) in choices:
        return None, []
    misfits = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _value(choice, value, key)
        except _Misfit as misfit:
            misfits.append(misfit)
    if len(misfits) == 1:
        raise misfits[0]
    raise _Misfit(key, " or ".join(misfit.wanted for misfit in misfits), value)


def _mapping(inner: tuple[Any, ...], value: Any, key: str) -> tuple[dict[Any, Any], list[Fault]]:
    if not isinstance(value, Mapping):
        raise _Misfit(key, _WORDS[dict], value)
    of_key, of_value = inner or (Any, Any)
    found, faults = {}, []
    for name, one in value.items():
        if of_key is str and not isinstance(name, str):
            raise _Misfit(key, "a mapping whose keys are texts", value)
        if of_key is int:  # an override with dots has a text: it comes behind the file's number, and takes its place
            if not re.fullmatch(r"-?\d{1,9}", str(name)):
                raise _Misfit(key, "a mapping whose keys are whole numbers", value)
            name = int(name)
        found[name], wrong = _value(of_value, one, f"{key}.{name}")
        faults += wrong
    return found, faults


def _scalar(kind: Any, value: Any, key: str) -> Any:
    if kind is bool:
        truth = value if isinstance(value, bool) else _TRUTHS.get(value.lower()) if isinstance(value, str) else None
        if truth is None:
            raise _Misfit(key, _WORDS[bool], value)
        return truth
    if kind is int or kind is float:
        if isinstance(value, bool) or not isinstance(value, str | int | (float if kind is float else int)):
            raise _Misfit(key, _WORDS[kind], value)
        try:
            return kind(value)
        except (ValueError, OverflowError) as error:
            raise _Misfit(key, _WORDS[kind], value) from error
    if kind is str:
        if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
            raise _Misfit(key, _WORDS[str], value)
        return str(value)
    return plain_numbers(value)  # of a type that is the user's own


def _word(kind: Any) -> str:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return "a mapping of keys"
    return _WORDS.get(kind, "a value")
