"""Features of samples on disk: one file each, bounded, checksummed, shared by any number of processes.

Files need only atomic renames, so the folder may be on a network file system, where database locks are unreliable.

A file is a BLAKE2b checksum followed by the tensor in the safetensors format. It is written under another name and
renamed; a read touches it, and the files that were touched longest ago are removed first.
"""

import hashlib
import os
import threading
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

SUFFIX = ".features"

_CHECKSUM_BYTES = 16
_LEAST, _SLACK = 0.8, 0.2
"""Share of the bound that is kept when files are removed, and share that may be written until the next removal."""


class FeatureCache:
    """Tensors by key in a folder of at most `max_bytes`.

    Attributes:
        hits: entries found. misses: entries not found, damaged ones included. damaged: entries whose checksum was
            wrong, or that hold no features; they are removed.
    """

    def __init__(self, folder: Path, max_bytes: int, *, fingerprint: str, writers: int = 1):
        """
        Args:
            fingerprint: of everything that features depend on besides the sample; entries with another one are not
                found.
            writers: processes that write into the folder at the same time; together they keep the bound.
        """
        self.hits = self.misses = self.damaged = 0
        self._folder, self._fingerprint = Path(folder), fingerprint
        self._least, self._slack = int(max_bytes * _LEAST), int(max_bytes * _SLACK / writers)
        self._written = 0
        self._gives_up = False
        self._lock = threading.Lock()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_room()

    def read(self, key: str) -> torch.Tensor | None:
        """The tensor of this key, on the CPU, or None. May be called from several threads."""
        path = self._path(key)
        try:
            raw = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            # Missing, or just removed by another process.
            self._count("misses")
            return None
        checksum, content = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
        try:
            if _checksum(content) != checksum:
                raise ValueError
            features = load(content)["features"]
        except (ValueError, KeyError, SafetensorError):  # whoever wrote it, it is computed again
            path.unlink(missing_ok=True)
            self._count("damaged")
            self._count("misses")
            return None
        self._count("hits")
        return features

    def write(self, key: str, features: torch.Tensor) -> None:
        """Store a tensor under this key. An error of the disk disables further writing with a warning; the run
        continues."""
        if self._gives_up:
            return
        content = save({"features": features.detach().to("cpu", copy=True).contiguous()})
        size = len(content) + _CHECKSUM_BYTES
        if size > self._slack:
            return
        path = self._path(key)
        partial = path.with_suffix(f".{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
        with self._lock:
            if self._written + size > self._slack:
                self._make_room()
            self._written += size
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_checksum(content) + content)
            partial.replace(path)
        except OSError as error:
            self._gives_up = True
            partial.unlink(missing_ok=True)
            warnings.warn(f"{self._folder}: no more features are kept in this run: {error}", stacklevel=2)

    def _make_room(self) -> None:
        """Remove the least recently used files, down to a share of the bound. Several processes may do so at once: they
        find the same files to be the oldest."""
        found = []
        for path in self._folder.glob("??/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime_ns, stat.st_size, path))
        size = sum(entry[1] for entry in found)
        for _, of_file, path in sorted(found):
            if size <= self._least:
                break
            path.unlink(missing_ok=True)
            size -= of_file
        self._written = 0

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(f"{self._fingerprint}|{key}".encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}{SUFFIX}"

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + 1)


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
