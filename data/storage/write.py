"""Writing shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from data.storage.files import replacing


def write_shard(path: Path, samples: Iterable[Sequence[tuple[str, bytes]]]) -> None:
    """Write a WebDataset tar of samples, each a list of (extension, content). Keys are numbers from 0.

    The file appears when it is complete. Times and owners are fixed, so equal samples give equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    from webdataset import ShardWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {"encoder": False, "mode": 0o644, "mtime": 0, "user": "", "group": ""}
    with (
        replacing(path, buffer=1 << 20) as file,
        ShardWriter("%d", sys.maxsize, sys.maxsize, verbose=0, opener=lambda _: file, **plain) as writer,
    ):
        for row, members in enumerate(samples):
            writer.write({"__key__": f"{row:06d}", **dict(members)})


def tar_bytes(size: int) -> int:
    """Return the bytes that a member of `size` bytes takes in a shard, if its name is short and ASCII."""
    return 512 + size + -size % 512
