"""Numbers of YAML that keep their source text, so that a key for text gets `1e5`, not 100000.0."""

import re
from typing import Any

import yaml

_MARK = re.compile("\0number ([^\0]*)\0")


class _Written:
    """Part of a number's class: it prints as it was written."""

    written: str

    def __repr__(self) -> str:
        return self.written


class WrittenInt(_Written, int):
    """A whole number that prints as it was written."""


class WrittenFloat(_Written, float):
    """A number that prints as it was written."""


def add_number_marks(loader: type) -> None:
    """Let a YAML loader read a number as a marked text wherever the number would print differently. Containers of
    OmegaConf hold no other classes; `without_marks` makes numbers of them again."""
    loader.add_constructor("tag:yaml.org,2002:int", _construct)  # type: ignore[attr-defined]
    loader.add_constructor("tag:yaml.org,2002:float", _construct)  # type: ignore[attr-defined]


def _construct(loader: Any, node: yaml.Node) -> int | float | str:
    text = str(loader.construct_scalar(node))
    if ":" in text:  # YAML 1.1 reads 12:30 as 750, a number of base 60
        return text
    number = _number(text)
    return number if str(number) == text else f"\0number {text}\0"


def _number(text: str) -> int | float:
    """Return the number of a text that YAML resolves to one; 0012 is 12, where YAML 1.1 has base 8."""
    digits = text.replace("_", "").lower()
    if re.fullmatch(r"[-+]?\d+", digits):
        return int(digits)
    if re.match(r"[-+]?0[xb]", digits):
        return int(digits, 0)
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def without_marks(value: Any) -> Any:
    """Nested dicts and lists with numbers in the place of marked texts: `WrittenInt` and `WrittenFloat`."""
    if isinstance(value, dict):
        return {marks_as_text(key): without_marks(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_marks(each) for each in value]
    mark = _MARK.fullmatch(value) if isinstance(value, str) else None
    if mark is None:
        return marks_as_text(value)
    number = _number(mark[1])
    kept = (WrittenInt if isinstance(number, int) else WrittenFloat)(number)
    kept.written = mark[1]
    return kept


def marks_as_text(value: Any) -> Any:
    """A text with the written form of each marked number in it; other values as they are."""
    return _MARK.sub(r"\1", value) if isinstance(value, str) else value


def plain_numbers(value: Any) -> Any:
    """Nested dicts and lists with ordinary numbers, for keys of any type."""
    if isinstance(value, dict):
        return {key: plain_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_numbers(each) for each in value]
    return int(value) if isinstance(value, WrittenInt) else float(value) if isinstance(value, WrittenFloat) else value
