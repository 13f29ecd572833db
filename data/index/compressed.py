"""Compressed tars cannot be indexed: each is an error that names it, and none is left out."""

import os
from collections.abc import Sequence

from data.errors import ShardError
from data.storage.url import Place

_ENDS = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raises ShardError if `path` is named like a compressed tar."""
    if os.fspath(path).lower().endswith(_ENDS):
        raise ShardError(
            f"{path}: compressed tars cannot be indexed, because their members have no fixed place in the file. "
            "Decompress it once (for example `gunzip FILE.tar.gz`; images and audio are compressed already)."
        )


def refuse_left_out(folder: Place, taken: Sequence[str], names: Sequence[str]) -> None:
    """Raises ShardError if a folder has compressed tars that would be left out: that are not read, and not unpacked
    beside.

    Args:
        taken: names of what is read of it.
        names: of everything in it.
    """
    compressed = sorted(name for name in names if name.lower().endswith(_ENDS))
    known = {*taken, *(name.removesuffix(".tar") for name in taken)} if compressed else set()
    others = [name for name in compressed if name not in known and name[: name.lower().rindex(".t")] not in known]
    if others:
        one, few = len(others) == 1, len(taken) == 1
        raise ShardError(
            f"{folder}: {len(others)} compressed tar{'' if one else 's'}, such as {others[0]}, beside {len(taken)} "
            f"shard{'' if few else 's'} would be left out: decompress {'it' if one else 'them'}, "
            f"or name what is to be read, such as '{folder}/*.tar'"
        )
