"""Builds the dataclasses of a config from nested values in one recursion: types, unknown keys, and every error at once.

pydantic is no alternative: it costs 0.2 of the 0.6 processor seconds of `mimo-train check` and accepts `true` as a
number. It returns nothing to check further if one value is wrong, and reports two errors for a union.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.text_format import shown_lines
from encoders.errors import EncoderError
from encoders.joined.spec import PARTS as JOINED
from encoders.joined.spec import JoinedSpec
from encoders.key_rules import rules_of
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import family_of, is_path
from mimo_train.config.errors import Fault, unknown_key
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.run_files import UNSET, WrittenFloat, WrittenInt
from mimo_train.config.schema_modules import LoraConfig, ModuleConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.config.user_code import search_working_directory

LONGEST_SHOWN = 80
"""Maximum characters of a value in a message."""

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_EXAMPLES = {list: "a list, for example [a, b]", dict: "a mapping, for example {a: 1}", bool: "true or false"}
_WORDS = {int: "a whole number", float: "a number", str: "a text", type(None): "null", **_EXAMPLES}

_ACCEPTED = {int: (str, int), float: (str, int, float), str: (str, int, float, Path)}
"""Types of a value that becomes a number or a text."""

_WRONG = object()
"""Stands for a value with an error."""


def structured(cls: type, plain: Any, prefix: str) -> tuple[Any, list[Fault]]:
    """Return an instance of the dataclass `cls` and every error; a wrong value has its default in the instance.

    Args:
        plain: nested dicts and lists.
        prefix: config key of `plain`.

    Returns:
        The instance is None if it, or an encoder or projector in it, cannot be built.
    """
    reading = _Reading()
    section = reading.section(cls, plain, prefix)
    return (section if reading.is_complete and section is not _WRONG else None), list(reading.faults.values())


def shown_plain(value: Any) -> str:
    """Return a value as text for a message: one line with at most `LONGEST_SHOWN` characters."""
    text = shown_lines(repr(value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _fields(cls: type) -> "dict[str, dataclasses.Field[Any]]":
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


@functools.cache
def _origin_and_arguments(wanted: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(wanted), typing.get_args(wanted)


class _Reading:
    """The recursion. Its methods return a value converted to its type, or `_WRONG` after recording the error.

    Attributes:
        faults: the first error of each key.
        is_complete: False if an encoder or projector cannot be built and has no usable defaults.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}
        self.is_complete = True

    def wrong(self, key: str, message: str) -> Any:
        self.faults.setdefault(key, Fault(key, message))
        return _WRONG

    def misfit(self, key: str, wanted: str, value: Any) -> Any:
        return self.wrong(key, f"must be {wanted}, is {shown_plain(value)}")

    def section(self, cls: type, plain: Any, prefix: str) -> Any:
        if not isinstance(plain, Mapping):
            return self.misfit(prefix, "a mapping of keys", plain)
        fields = _fields(cls)
        values = {}
        for name, value in plain.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            if name not in fields:
                fault = unknown_key(key.removesuffix(str(name)), str(name), fields)
                self.faults.setdefault(fault.key, fault)
                continue
            item = self.field(cls, fields[name], value, key)
            if item is not _WRONG:
                values[name] = item
        if cls is LoraConfig and plain and not {"rank", "adapter"} & plain.keys():
            self.wrong(f"{prefix}.rank", f"is missing, but {', '.join(map(str, plain))} is set. Set a rank, or 0")
        missing = [name for name, field in fields.items() if _is_required(field) and name not in values]
        for name in missing:
            if name not in plain:
                self.wrong(f"{prefix}.{name}", "is missing. Set it")
        return _WRONG if missing else cls(**values)

    def field(self, cls: type, field: "dataclasses.Field[Any]", value: Any, key: str) -> Any:
        rules = rules_of(field)
        if rules.choices and isinstance(value, bool | int | float):  # YAML reads words such as off or 1 as these
            return self.wrong(key, rules.complaint(value))
        part = _class_of_part(cls, field.name, value)
        if part is None or value is None:
            return self.value(_hints(cls)[field.name], value, key)
        spec = self.encoder(value, key) if part is _ENCODER else self.section(part, value, key)
        self.is_complete &= spec is not _WRONG
        return spec

    def encoder(self, plain: Any, key: str) -> Any:
        """Read an encoder, whose class follows from its family."""
        family = plain.get("family", "vit") if isinstance(plain, Mapping) else "vit"
        if not isinstance(family, str):
            return self.wrong(f"{key}.family", f"must be the name of a family, is {shown_plain(family)}")
        if is_path(family):
            search_working_directory()
        try:
            return self.section(family_of(family).spec, plain, key)
        except EncoderError as error:
            return self.wrong(f"{key}.family", str(error))

    def value(self, wanted: Any, value: Any, key: str) -> Any:
        origin, inner = _origin_and_arguments(wanted)
        kind = origin or wanted
        if isinstance(value, str) and value == UNSET:
            return self.wrong(key, f"is {UNSET}, a value that is still missing. Set it")
        if origin in (typing.Union, types.UnionType):
            return self.union(inner, value, key)
        if origin is typing.Literal:
            return value if value in inner else self.misfit(key, " or ".join(map(str, inner)), value)
        if kind is Any:
            return self.anything(value, key)
        if value is None and kind is not type(None):
            return self.misfit(key, f"{_word(wanted)} (or left away)", value)
        if kind in (list, tuple, set):
            if not isinstance(value, list | tuple):
                return self.misfit(key, _WORDS[list], value)
            items = [self.value(inner[0] if inner else Any, item, f"{key}[{at}]") for at, item in enumerate(value)]
            return _WRONG if _WRONG in items else kind(items)
        if kind is dict:
            of_key, of_value = inner or (Any, Any)
            return self.mapping(of_key, of_value, value, key)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self.section(kind, value, key)
        return self.scalar(kind, value, key)

    def union(self, choices: tuple[Any, ...], value: Any, key: str) -> Any:
        """Read a value of one of several types, the first without an error."""
        if value is None and type(None) in choices:
            return None
        choices = tuple(choice for choice in choices if choice is not type(None))
        if len(choices) == 1:
            return self.value(choices[0], value, key)
        for choice in choices:
            attempt = _Reading()
            result = attempt.value(choice, value, key)
            if not attempt.faults:
                return result
            if key not in attempt.faults:  # the type is right, but something inside it is wrong
                self.faults |= attempt.faults
                return result
        return self.misfit(key, " or ".join(map(_word, choices)), value)

    def mapping(self, of_key: Any, of_value: Any, value: Any, key: str) -> Any:
        """Read a mapping with user-defined keys."""
        if not isinstance(value, Mapping):
            return self.misfit(key, _WORDS[dict], value)
        items: dict[Any, Any] = {}
        for name, item in value.items():
            if item is None and ":" in str(name):  # YAML reads {a:1} as a key without a value
                pair = str(name).replace(":", ": ", 1)
                self.wrong(key, f"{str(name)!r} has no value. Write a space after the colon, {{{pair}}}")
                continue
            if of_key is str and not isinstance(name, str):
                return self.misfit(key, "a mapping whose keys are texts", value)
            # The key of a dotted override is a text; its value comes after the file's, and replaces it.
            if of_key is int and not re.fullmatch(r"-?\d{1,9}", str(name)):
                return self.misfit(key, "a mapping whose keys are whole numbers", value)
            if item is None and dataclasses.is_dataclass(of_value):
                item = {}
            item = self.value(of_value, item, f"{key}.{name}")
            if item is not _WRONG:
                items[int(name) if of_key is int else name] = item
        return items

    def anything(self, value: Any, key: str) -> Any:
        """Read a value of a user-defined type, with ordinary numbers."""
        if isinstance(value, Mapping):
            return self.mapping(Any, Any, value, key)
        if isinstance(value, list):
            return self.value(list[Any], value, key)
        return (
            int(value) if isinstance(value, WrittenInt) else float(value) if isinstance(value, WrittenFloat) else value
        )

    def scalar(self, kind: Any, value: Any, key: str) -> Any:
        if kind is bool:
            truth = value if isinstance(value, bool) else _TRUTHS.get(value.lower()) if isinstance(value, str) else None
            return self.misfit(key, _WORDS[bool], value) if truth is None else truth
        if kind not in _ACCEPTED:
            return self.anything(value, key)
        if isinstance(value, bool) or not isinstance(value, _ACCEPTED[kind]):
            return self.misfit(key, _WORDS[kind], value)
        try:
            return kind(value)
        except (ValueError, OverflowError):
            return self.misfit(key, _WORDS[kind], value)


_ENCODER = object()
"""Stands for the class of an encoder, which its family names."""


def _class_of_part(cls: type, name: str, plain: Any) -> Any:
    """Return the class of a field whose type is `Any` because it depends on other keys; None for other fields."""
    if cls is ModuleConfig and name == "llm":
        return TransformersLlm if isinstance(plain, Mapping) and "model_config" in plain else LlmSpec
    if (cls is ModuleConfig and name == "encoder") or (name in JOINED and issubclass(cls, JoinedSpec)):
        return _ENCODER
    return ProjectorSpec if cls is ModuleConfig and name == "projector" else None


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _word(wanted: Any) -> str:
    kind = typing.get_origin(wanted) or wanted
    if kind is typing.Literal:
        return " or ".join(map(str, typing.get_args(wanted)))
    return "a mapping of keys" if dataclasses.is_dataclass(kind) else _WORDS.get(kind, "a value")
