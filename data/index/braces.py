"""Several names in one text: `x-{000000..000003}.tar`, `{a,b}.tar`, and commas."""

from __future__ import annotations

import re

from data.errors import DataError


def expand_braces(text: str) -> list[str]:
    """`a-{08..10}` -> a-08, a-09, a-10; `{x,y}` -> x, y; several groups multiply, the last varies fastest."""
    group = re.search(r"\{([^{}]*)\}", text)
    if group is None:
        return [text]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", group[1])
    if numbers:
        choices = _numbers(numbers, text)
    elif "," in group[1]:
        choices = group[1].split(",")
    else:
        raise DataError(
            f"data.shards: cannot read {group[0]} in {text!r}; write a range {{000000..000003}} or a choice {{a,b}}"
        )
    rest = expand_braces(text[group.end() :])
    return [text[: group.start()] + choice + tail for choice in choices for tail in rest]


def expand_ranges(text: str) -> list[str]:
    """As `expand_braces`, but that braces with anything else than a range of numbers stay as they are."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if numbers is None:
        return [text]
    rest = expand_ranges(text[numbers.end() :])
    return [text[: numbers.start()] + one + tail for one in _numbers(numbers, text) for tail in rest]


def _numbers(found: re.Match[str], text: str) -> list[str]:
    """Those of a range, as wide as its first."""
    first, last = int(found[1]), int(found[2])
    if last < first:
        raise DataError(f"data.shards: the range {{{found[1]}..{found[2]}}} in {text!r} runs backwards")
    return [str(number).zfill(len(found[1])) for number in range(first, last + 1)]


def split_commas(text: str) -> list[str]:
    """Splits at the commas outside braces."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]
