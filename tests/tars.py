"""Shards made by hand."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A shard of these members, (name, bytes) in order; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path
