"""Find .bin and .idx files: `data.shards` names either these or tars."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from data.errors import DataError
from data.index.shard_names import expand_braces
from data.index.shards import find_shards, patterns_of, refuse_tokens
from data.order.sources import Shards
from data.storage.url import Place, is_url

INDEX, TOKENS = ".idx", ".bin"


def is_indexed(shards: Shards) -> bool:
    """True if a source has .bin and .idx files; False for tars or missing files. Raises DataError for both."""
    return bool(_found(shards))


def find_indexed(shards: Shards) -> list[Path]:
    """Return the .idx files of a source, in the order given.

    A source is `PREFIX`, `PREFIX.idx` or `PREFIX.bin`, a glob or brace range of these, a folder (sorted), or several
    separated by commas.

    Raises:
        DataError: it has no such files, or tars too.
    """
    found = _found(shards)
    if not found:
        raise DataError(f"data.shards: {shards} names no {TOKENS} and {INDEX} files")
    return found


def find_any(shards: Shards) -> list[Place]:
    """Return the files of a source, of either kind. Raises DataError as `find_indexed` and `find_shards` do."""
    return [*(_found(shards) or find_shards(shards))]


def _found(shards: Shards) -> list[Path]:
    """Return the .idx files; empty if names say that the source is of tars."""
    of_parts = {part: _of_part(part) for part in patterns_of(shards)}
    indexed = [part for part, found in of_parts.items() if found]
    if indexed and len(indexed) < len(of_parts):
        other = next(part for part, found in of_parts.items() if not found)
        raise DataError(
            f"data.shards: {indexed[0]} is of {TOKENS} and {INDEX} files, and {other} is not: a run reads one kind"
        )
    return [path for found in of_parts.values() for path in found]


def _of_part(part: str) -> list[Path]:
    if part.endswith(".tar"):  # there may be thousands, and a look at each is slow on a slow file system
        return []
    if is_url(part) and not part.startswith("file://"):
        refuse_tokens(part)
        return []
    path = Path(part.removeprefix("file://")).expanduser()
    if path.is_dir():
        return _of_folder(path)
    return [found for name in expand_braces(str(path)) for found in _of_name(name)]


def _of_folder(folder: Path) -> list[Path]:
    # Other programs name indexes of tars x.tar.idx.
    named = (path for path in folder.glob(f"*{INDEX}") if not path.stem.endswith(".tar"))
    found = sorted(named, key=lambda one: one.name)
    if found and (tar := next(folder.glob("*.tar"), None)):
        raise DataError(
            f"data.shards: the folder {folder} holds {found[0].name} and {tar.name}, and a run reads one kind: name "
            "the files"
        )
    return found


def _of_name(name: str) -> list[Path]:
    if name.endswith((INDEX, TOKENS)):
        names = sorted(glob.glob(name)) if glob.has_magic(name) and not os.path.exists(name) else [name]
        return [Path(f"{one[:-4]}{INDEX}") for one in names if os.path.exists(one)]
    if os.path.exists(name):
        return []
    if any(os.path.exists(name + ending) for ending in (INDEX, TOKENS)):
        return [Path(name + INDEX)]
    if glob.has_magic(name) and not glob.glob(name):
        return [Path(one) for one in sorted(glob.glob(name + INDEX))]
    return []
