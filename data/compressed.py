"""Compressed tars, which have no index: refused by name where shards are read by it."""

import os
from collections.abc import Sequence

from data.errors import ShardError
from data.storage.url import Place

_ENDS = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raises ShardError if `path` is named like a compressed tar."""
    if os.fspath(path).lower().endswith(_ENDS):
        raise ShardError(
            f"{path}: compressed tars cannot be indexed, because their members have no fixed place in the file. "
            "Decompress it (for example `gunzip FILE.tar.gz`; pictures and audio are compressed already), or read it "
            "from beginning to end: data.stream=true (docs/data.md#streams)."
        )


def refuse_left_out(folder: Place, tars: Sequence[str], names: Sequence[str]) -> None:
    """Raises ShardError if a folder has compressed tars that its tars are not unpacked of: they would be left out.

    Args:
        tars: names of the shards in it.
        names: of everything in it.
    """
    compressed = sorted(name for name in names if name.lower().endswith(_ENDS))
    unpacked = {name.removesuffix(".tar") for name in tars} if compressed else set()
    others = [name for name in compressed if name[: name.lower().rindex(".t")] not in unpacked]
    if others:
        raise ShardError(
            f"{folder}: {len(others)} compressed tar{'s' * (len(others) > 1)}, such as {others[0]}, beside {len(tars)} "
            f"tar{'s' * (len(tars) > 1)}, would be left out: decompress, read all from beginning to end "
            f"(data.stream=true), or name what is to be read, such as '{folder}/*.tar'"
        )
