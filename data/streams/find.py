"""What `data.shards` names where shards are read from beginning to end: files, URLs, and commands."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from data.braces import expand_braces, expand_ranges
from data.compressed import READ
from data.errors import DataError
from data.shards import find_shards, patterns_of
from data.storage.command import PIPE, Command
from data.storage.streams import Origin
from data.storage.url import WEB, Url, is_url

SUFFIXES = (".tar", *READ)
"""Of the files of a folder that are read."""
_ENDINGS = re.compile(r"\.(tar|tar\.gz|tgz|tar\.zst|tzst)$", re.IGNORECASE)


def find_streams(pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Url]) -> list[Origin]:
    """Shards in a fixed order: what `find_shards` takes, compressed or not, and `pipe:COMMAND`, which is one command
    for each number of its ranges `{000..127}`; commas and all other braces are the shell's. Files of a web server are
    not asked for before they are read.

    Raises:
        DataError: as of `find_shards`.
    """
    if isinstance(pattern, str) and pattern.lstrip().startswith(PIPE):
        commands = [text.removeprefix(PIPE).strip() for text in expand_ranges(pattern.strip())]
        if not all(commands):
            raise DataError(f"data.shards: {pattern!r} is no command: write pipe: and what the shell is to run")
        return [Command(text) for text in commands]
    found: list[Origin] = []
    for part in patterns_of(pattern):
        if part.startswith(PIPE):
            raise DataError(f"data.shards: {part!r} is a command among others: give one, with {{000..127}} for several")
        if is_url(part) and part.lower().startswith(tuple(f"{scheme}://" for scheme in WEB)):
            found += map(Url.parse, expand_braces(part))
        else:
            found += find_shards([part], SUFFIXES)
    if not found:
        raise DataError("data.shards is empty: give a folder, a glob, a range such as 'x-{000000..000003}.tar.gz'")
    _require_once(found)
    return found


def _require_once(found: Sequence[Origin]) -> None:
    known: dict[str, Origin] = {}
    for one in found:
        stem = _ENDINGS.sub("", str(one))
        if known.setdefault(stem, one) != one:
            raise DataError(
                f"data.shards: {one} and {known[stem]} would both be read: remove one, or name the files of one kind"
            )


def is_stream(pattern: str) -> bool:
    """Whether a pattern names what is read from beginning to end alone: a command, compressed shards, or a folder with
    them and no others."""
    if pattern.lstrip().startswith(PIPE) or pattern.rstrip().lower().endswith(READ):
        return True
    folder = Path(pattern.strip().removeprefix("file://")).expanduser()
    try:
        names = os.listdir(folder) if folder.is_dir() else []
    except OSError:  # which finding its shards says
        names = []
    return any(name.endswith(READ) for name in names) and not any(name.endswith(".tar") for name in names)
