"""Several names in one text: `x-{000000..000003}.tar`, `{a,b}.tar`, and commas."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from data.errors import DataError, ShardError
from data.storage.url import Place


def expand_braces(text: str) -> list[str]:
    """Expand braces: `a-{08..10}` -> a-08, a-09, a-10; `{x,y}` -> x, y; of several groups, the last varies fastest."""
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
    """Expand ranges of numbers as `expand_braces`, but keep other braces."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if numbers is None:
        return [text]
    rest = expand_ranges(text[numbers.end() :])
    return [text[: numbers.start()] + one + tail for one in _numbers(numbers, text) for tail in rest]


def _numbers(found: re.Match[str], text: str) -> list[str]:
    first, last = int(found[1]), int(found[2])
    if last < first:
        raise DataError(f"data.shards: the range {{{found[1]}..{found[2]}}} in {text!r} runs backwards")
    return [str(number).zfill(len(found[1])) for number in range(first, last + 1)]


def split_commas(text: str) -> list[str]:
    """Split at commas outside braces."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


_ENDS = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raise ShardError if `path` is named like a compressed tar."""
    if os.fspath(path).lower().endswith(_ENDS):
        raise ShardError(
            f"{path}: compressed tars cannot be indexed, because their members have no fixed place in the file. "
            "Decompress it once (for example `gunzip FILE.tar.gz`; images and audio are compressed already)."
        )


def refuse_left_out(folder: Place, taken: Sequence[str], names: Sequence[str]) -> None:
    """Raise ShardError if a folder with `names` has compressed tars without an unpacked one among the `taken`."""
    compressed = sorted(name for name in names if name.lower().endswith(_ENDS))
    known = {*taken, *(name.removesuffix(".tar") for name in taken)} if compressed else set()
    others = [name for name in compressed if name not in known and name[: name.lower().rindex(".t")] not in known]
    if others:
        one, few = len(others) == 1, len(taken) == 1
        raise ShardError(
            f"{folder}: {len(others)} compressed tar{'' if one else 's'}, such as {others[0]}, next to {len(taken)} "
            f"shard{'' if few else 's'} would be left out: decompress {'it' if one else 'them'}, "
            f"or name what is to be read, such as '{folder}/*.tar'"
        )
