"""Writing shards."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from data.storage.replace import replacing


def write_shard(path: Path, samples: Iterable[list[tuple[str, bytes]]], first: int = 0) -> None:
    """A tar of samples, each a list of (extension, content). Keys are numbers from `first` on. Times and owners are
    fixed, so that equal content gives equal bytes. The file appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for row, members in enumerate(samples, first):
            for extension, raw in members:
                info = tarfile.TarInfo(f"{row:06d}.{extension}")
                info.size, info.mode = len(raw), 0o644
                tar.addfile(info, io.BytesIO(raw))
            tar.members.clear()  # type: ignore[attr-defined]  # `tarfile` would keep every one
