"""Finding shards: a folder, a glob, a brace range, or a list of these -> paths in a fixed order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from data.errors import DataError, ShardError
from data.storage.retry import retrying
from data.storage.version import require_file

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")


def find_shards(pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Paths of the shards that `pattern` names.

    Accepted: a folder (its `*.tar`, sorted by name), a file, a glob (sorted), a brace range such as
    `x-{000000..000003}.tar` or choice `{a,b}.tar` (in the order written; each must exist), several of these separated
    by commas, or a sequence of them (in the order given).

    Raises:
        DataError: nothing matches, or a named shard is missing (names `data.shards` and what was looked for).
        ShardError: a match is a compressed tar, or no file.
    """
    if isinstance(pattern, str):
        parts: list[str] = _split_commas(pattern)
    elif isinstance(pattern, os.PathLike):
        parts = [os.fspath(pattern)]
    else:
        # A path is one shard, whatever its name; a text may be several.
        parts = [
            piece for item in pattern for piece in (_split_commas(item) if isinstance(item, str) else [os.fspath(item)])
        ]
    if not parts:
        raise DataError(
            "data.shards is empty: give a folder, a glob, a brace range such as 'x-{000000..000003}.tar', or a list"
        )
    found = [path for part in parts for path in _find_one(part)]
    for path in found:
        require_file(path, retrying(path.stat, f"{path}: cannot look at it"))
    return found


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raises ShardError if `path` is named like a compressed tar."""
    if os.fspath(path).lower().endswith(_COMPRESSED):
        raise ShardError(
            f"{path}: compressed tars cannot be indexed, because their members have no fixed place in the file. "
            "Decompress it (for example `gunzip FILE.tar.gz`); pictures and audio are compressed already."
        )


def _find_one(part: str) -> list[Path]:
    if re.match(r"^[a-z0-9+]+://|^pipe:", part):
        raise DataError(
            f"data.shards: {part!r} is not a path. Shards are read from a file system: mount or copy them first."
        )
    path = Path(part).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.tar"))
        if not found:
            for name in sorted(os.listdir(path)):
                refuse_compressed(path / name)
            raise DataError(f"data.shards: the folder {path} holds no *.tar file")
        return found
    if path.exists():
        refuse_compressed(path)
        return [path]
    found = []
    for name in _expand_braces(str(path)):
        matches = [Path(name)] if os.path.exists(name) else [Path(match) for match in sorted(glob.glob(name))]
        if not matches:
            kind = "no file matches" if glob.has_magic(name) else "no such file or folder:"
            hint = "" if name == str(path) else f" (from {part!r})"
            raise DataError(f"data.shards: {kind} {name}{hint}; looked from {os.getcwd()}")
        for match in matches:
            refuse_compressed(match)
        found.extend(matches)
    return found


def _split_commas(text: str) -> list[str]:
    """Splits at the commas outside braces."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand_braces(text: str) -> list[str]:
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
    rest = _expand_braces(text[group.end() :])
    return [text[: group.start()] + choice + tail for choice in choices for tail in rest]
