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
        first, last = int(numbers[1]), int(numbers[2])
        if last < first:
            raise DataError(f"data.shards: the range {group[0]} in {text!r} runs backwards")
        width = len(numbers[1])
        choices = [str(number).zfill(width) for number in range(first, last + 1)]
    elif "," in group[1]:
        choices = group[1].split(",")
    else:
        raise DataError(
            f"data.shards: cannot read {group[0]} in {text!r}; write a range {{000000..000003}} or a choice {{a,b}}"
        )
    rest = expand_braces(text[group.end() :])
    return [text[: group.start()] + choice + tail for choice in choices for tail in rest]


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
