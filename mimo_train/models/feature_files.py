"""Features of samples on disk: one file each, in the safetensors format (`data.storage.file_cache`)."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from data.storage.file_cache import FileCache

SUFFIX = ".features"


class FeatureCache:
    """Tensors by key in a folder of at most `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int, *, fingerprint: str, writers: int = 1):
        """
        Args:
            fingerprint: of everything that features depend on besides the sample; entries with another one are not
                found.
            writers: processes that write into the folder at the same time; together they keep the bound.
        """
        self._fingerprint = fingerprint
        self._files = FileCache(folder, max_bytes, suffix=SUFFIX, what="features", writers=writers)

    @property
    def hits(self) -> int:
        """Entries found."""
        return self._files.hits

    @property
    def misses(self) -> int:
        """Entries not found, damaged ones included."""
        return self._files.misses

    @property
    def damaged(self) -> int:
        """Entries whose checksum was wrong, or that hold no features; they are removed."""
        return self._files.damaged

    def read(self, key: str) -> torch.Tensor | None:
        """The tensor of this key, on the CPU, or None. May be called from several threads."""
        content = self._files.read(self._key(key))
        if content is None:
            return None
        try:
            return load(content)["features"]
        except (ValueError, KeyError, SafetensorError):  # whoever wrote it, it is computed again
            self._files.drop(self._key(key))
            return None

    def write(self, key: str, features: torch.Tensor) -> None:
        """Store a tensor under this key. An error of the disk disables further writing with a warning; the run
        continues."""
        content = save({"features": features.detach().to("cpu", copy=True).contiguous()})
        self._files.write(self._key(key), content)

    def _key(self, key: str) -> str:
        return f"{self._fingerprint}|{key}"
