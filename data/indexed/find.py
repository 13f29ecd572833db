"""Find .bin and .idx files: `data.shards` names either these, or tars and parquet files."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from data.errors import DataError
from data.index.find_shards import Shards, expand_braces, find_shards, patterns_of
from data.storage.url import Place, is_url

INDEX, TOKENS = ".idx", ".bin"


def is_indexed(shards: Shards) -> bool:
    """True if a source has .bin and .idx files; False for other or missing files. Raises DataError for both."""
    return bool(_find(shards))


def find_indexed(shards: Shards) -> list[Path]:
    """Return the .idx files of a source, in the order given.

    A source is `PREFIX`, `PREFIX.idx` or `PREFIX.bin`, a glob or brace range of these, a folder (sorted), or several
    separated by commas.

    Raises:
        DataError: it has no such files, or tars too.
    """
    indexes = _find(shards)
    if not indexes:
        raise DataError(f"data.shards: {shards} names no {TOKENS} and {INDEX} files")
    return indexes


def find_any(shards: Shards) -> list[Place]:
    """Return the files of a source, of either kind. Raises DataError as `find_indexed` and `find_shards` do."""
    return [*(_find(shards) or find_shards(shards))]


def _find(shards: Shards) -> list[Path]:
    """Return the .idx files; empty if names say that the source is of tars."""
    by_part = {part: _find_part(part) for part in patterns_of(shards)}
    indexed = [part for part, indexes in by_part.items() if indexes]
    if indexed and len(indexed) < len(by_part):
        other = next(part for part, indexes in by_part.items() if not indexes)
        raise DataError(
            f"data.shards: {indexed[0]} is of {TOKENS} and {INDEX} files, and {other} is not: a run reads one kind"
        )
    return [path for indexes in by_part.values() for path in indexes]


def _find_part(part: str) -> list[Path]:
    if part.endswith((".tar", ".parquet")):  # there may be thousands, and a look at each is slow on a slow file system
        return []
    if is_url(part) and not part.startswith("file://"):
        if part.endswith((INDEX, TOKENS)):
            raise DataError(
                f"data.shards: {part}: .bin and .idx files are read from file systems only: copy them, or mount the "
                "storage"
            )
        return []
    path = Path(part.removeprefix("file://")).expanduser()
    if not path.is_dir():
        return [index for name in expand_braces(str(path)) for index in _find_name(name)]
    # Other programs name indexes of tars x.tar.idx.
    indexes = sorted(index for index in path.glob(f"*{INDEX}") if not index.stem.endswith(".tar"))
    if indexes and (tar := next(path.glob("*.tar"), None)):
        raise DataError(
            f"data.shards: the folder {path} holds {indexes[0].name} and {tar.name}, and a run reads one kind: name "
            "the files"
        )
    return indexes


def _find_name(name: str) -> list[Path]:
    if name.endswith((INDEX, TOKENS)):
        names = [name] if os.path.exists(name) else sorted(glob.glob(name))
        return [Path(path[:-4] + INDEX) for path in names]
    if os.path.exists(name):
        return []
    if os.path.exists(name + INDEX) or os.path.exists(name + TOKENS):
        return [Path(name + INDEX)]
    return [] if glob.glob(name) else [Path(path) for path in sorted(glob.glob(name + INDEX))]
