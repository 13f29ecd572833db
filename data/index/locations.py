"""Where files about shards lie: beside them, in `data.cache_dir`, or in the user's cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from data.errors import DataError
from data.storage.url import Place, Url, place_of

_SUFFIX = ".mimo-catalogue"


def by_folder(shards: Sequence[Place]) -> list[list[int]]:
    """The numbers of the shards of each folder, in the order in which folders occur."""
    numbers: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(str(shard).rpartition("/")[0], []).append(number)
    return [*numbers.values()]


def catalogue_path(
    shard: str | os.PathLike[str] | Url,
    cache_dir: str | os.PathLike[str] | None = None,
    writable: bool = False,
    suffix: str = _SUFFIX,
) -> Path:
    """Where the catalogue of a shard's folder lies, or another file about its shards: beside them, or in `cache_dir` if
    given. With `writable`, a user-wide cache folder takes the place of a shard folder that this process may not write
    to; so it does of a URL's."""
    shard = place_of(shard)
    folder = shard.absolute().parent
    kept = _kept_in(shard, cache_dir, writable)
    if kept is None:
        assert isinstance(folder, Path)
        return folder / f"shards{suffix}"
    # Folders often share their names; the hash keeps them apart.
    place = hashlib.sha256(os.fsencode(str(folder))).hexdigest()[:12]
    return kept / f"{folder.name}.{place}{suffix}"


def _kept_in(shard: Place, cache_dir: str | os.PathLike[str] | None, writable: bool) -> Path | None:
    if cache_dir is not None:
        return cache_folder(cache_dir)
    if isinstance(shard, Url) or (writable and not os.access(shard.parent, os.W_OK)):
        return cache_folder(None) / "index"
    return None


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """`cache_dir`, or that of the user. Raises DataError where there is no home folder to find it in."""
    try:
        if cache_dir is not None:
            return Path(cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimo-train"
    except RuntimeError as error:
        raise DataError(
            f"data.cache_dir: {cache_dir or 'is empty'}, and this user has no home folder (HOME): set it to a folder "
            "that can be written"
        ) from error
