"""Compressed tars, which have no index: refused by name where shards are read by it, and never left out."""

import os
from collections.abc import Sequence

from data.errors import ShardError
from data.storage.url import Place

READ = (".tar.gz", ".tgz", ".tar.zst", ".tzst")
"""Endings of what is read from beginning to end, by `data.stream`."""
_ENDS = (*READ, ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Raises ShardError if `path` is named like a compressed tar."""
    name = os.fspath(path).lower()
    if name.endswith(_ENDS):
        stream = ", or read it from beginning to end: data.stream=true (docs/data.md#streams)"
        raise ShardError(
            f"{path}: compressed tars cannot be indexed, because their members have no fixed place in the file. "
            "Decompress it (for example `gunzip FILE.tar.gz`; pictures and audio are compressed already)"
            f"{stream if name.endswith(READ) else ''}."
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
        stream = all(name.endswith(READ) for name in others)
        raise ShardError(
            f"{folder}: {len(others)} compressed tar{'' if one else 's'}, such as {others[0]}, beside {len(taken)} "
            f"shard{'' if few else 's'} would be left out: decompress {'it' if one else 'them'}, "
            f"{'read all from beginning to end (data.stream=true), ' if stream else ''}"
            f"or name what is to be read, such as '{folder}/*.tar'"
        )
