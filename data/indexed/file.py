"""A pair of Megatron-LM files: PREFIX.bin has consecutive tokens, PREFIX.idx the starts of documents.

The index is little-endian: a 34-byte header (b"MMIDIDX\\0\\0", version 1, dtype code, numbers of sequences and of
document ends), int32 sequence lengths, int64 byte offsets of sequences, and int64 first sequences of documents, with
one more for the end. `megatron.core.datasets.IndexedDataset` is not used: here reads are retried, compared with the
file that was opened first, and never short. tests/unit/data/test_indexed.py compares the two.
"""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np

from data.errors import ShardError
from data.storage.files import RETRIES, ShardVersion, open_file, retrying
from data.storage.reader import ShardReader

Part = tuple[float, float]
"""First and last share of a file's documents."""
WHOLE: Part = (0.0, 1.0)
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of integer types; 6 and 7 are floats."""
_AT_ONCE = 1 << 20  # sequences per check


class IndexedFile:
    """The documents of one pair of files. `path` and `version` are those of the .bin; `content` is of both.

    Raises ShardError if a file is missing, damaged or of another kind, or the two do not match, and ReadError.
    """

    def __init__(self, index: Path, read_retries: int = RETRIES) -> None:
        self.index, self.path = index, index.with_name(f"{index.name.removesuffix('.idx')}.bin")
        for path, other in ((self.index, self.path), (self.path, self.index)):
            if not path.exists():
                raise ShardError(f"{path}: there is no such file, only {other.name}: both are needed")
        version, raw = retrying(self._read_index, f"{self.index}: cannot read it", read_retries)
        self.version = retrying(self._version, f"{self.path}: cannot look at it", read_retries)
        self.content = f"{self.version.content}{version.content}"
        code, self._sequences, ends = self._checked_head(raw[: _HEAD.size].tobytes(), version.size)
        self.dtype, self.documents = np.dtype(_TYPES[code]), ends - 1
        at = _HEAD.size
        self._lengths = raw[at : at + 4 * self._sequences].view("<i4")
        at += 4 * self._sequences
        self._places = raw[at : at + 8 * self._sequences].view("<i8")
        at += 8 * self._sequences
        self._firsts = raw[at : at + 8 * ends].view("<i8")
        self.tokens = self._checked_ends()

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Return the tokens before each of `documents` (0 to the number of documents), int64."""
        firsts = self._firsts[documents]
        inside = firsts < self._sequences
        starts = np.full(len(firsts), self.tokens, dtype=np.int64)
        starts[inside] = self._places[firsts[inside]] // self.dtype.itemsize
        return starts

    def document_at(self, token: int) -> int:
        """Return the document of a token of the file."""
        return int(self.documents_at(np.array([token]))[0])

    def documents_at(self, tokens: np.ndarray) -> np.ndarray:
        """Return `document_at` of each of `tokens`, int64."""
        # `np.searchsorted` would copy the index, which is unaligned after the 34-byte header.
        low, high = np.zeros(len(tokens), dtype=np.int64), np.full(len(tokens), self.documents, dtype=np.int64)
        while (high - low > 1).any():
            middle = (low + high) // 2
            below = self.starts(middle) <= tokens
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return low

    def ends_in(self, begin: int, size: int) -> np.ndarray:
        """Return the document ends in tokens [begin, begin + size), ascending from 1 to `size`, int64.

        Position begin + size must be in the file. Raises ShardError if the index is damaged there.
        """
        first, last = self.document_at(begin), self.document_at(begin + size)
        ends = self.starts(np.arange(first + 1, last + 1)) - begin
        self._require_ascending(ends, size)
        return np.unique(ends)

    def lengths_in(self, begins: np.ndarray, size: int) -> list[np.ndarray]:
        """Return the tokens of each document in windows of `size` tokens, int64. May raise ShardError."""
        lows, highs = self.documents_at(begins), self.documents_at(begins + size - 1)
        counts, windows = highs - lows, np.arange(len(begins))
        owners = np.repeat(windows, counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self.starts(lows[owners] + 1 + within) - begins[owners]
        self._require_ascending(starts + owners * size, len(begins) * size)
        # starts of documents, with all windows laid out one after the other
        cuts = np.unique(np.concatenate([windows * size, starts + owners * size, [len(begins) * size]]))
        lengths, firsts = np.diff(cuts), np.searchsorted(cuts, np.arange(len(begins) + 1) * size)
        return [lengths[first:last] for first, last in pairwise(firsts.tolist())]

    def _require_ascending(self, starts: np.ndarray, most: int) -> None:
        if len(starts) and (starts[0] < 0 or starts[-1] > most or (np.diff(starts) < 0).any()):
            raise ShardError(f"{self.index}: its documents do not stand one behind the other: it is damaged")

    def read(self, reader: ShardReader, first: int, count: int) -> np.ndarray:
        """Return `count` tokens of `dtype`, from token `first` of the file. Raises the errors of `ShardReader.read`."""
        width = self.dtype.itemsize
        return np.frombuffer(reader.read(self.path, first * width, count * width, "bin", self.version), self.dtype)

    def require_whole(self) -> None:
        """Check the whole index. Raises ShardError unless sequences and documents are consecutive."""
        end = 0
        for first in range(0, self._sequences, _AT_ONCE):
            sizes = self._lengths[first : first + _AT_ONCE].astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            if (sizes < 0).any() or (self._places[first : first + _AT_ONCE] != ends - sizes).any():
                raise ShardError(f"{self.index}: its sequences do not stand one behind the other: it is damaged")
            end = int(ends[-1])
        for first in range(0, self.documents, _AT_ONCE):
            if (np.diff(self._firsts[first : first + _AT_ONCE + 1]) < 0).any():
                raise ShardError(f"{self.index}: its documents do not stand one behind the other: it is damaged")

    def _read_index(self) -> tuple[ShardVersion, np.ndarray]:
        with os.fdopen(open_file(self.index), "rb") as file:
            version = ShardVersion.of(file.fileno())
            raw = np.memmap(file, mode="r").view(np.ndarray) if version.size else np.zeros(0, dtype=np.uint8)
        return version, raw

    def _version(self) -> ShardVersion:
        with os.fdopen(open_file(self.path), "rb") as file:
            return ShardVersion.of(file.fileno())

    def _checked_head(self, head: bytes, size: int) -> tuple[int, int, int]:
        """Return (dtype code, sequences, document ends)."""
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise ShardError(f"{self.index}: is no index of Megatron-LM: it does not begin with {_MAGIC[:7].decode()}")
        _, version, code, sequences, ends = _HEAD.unpack(head)
        if version != _VERSION:
            raise ShardError(f"{self.index}: is of version {version}, and only version {_VERSION} is read")
        if code not in _TYPES:
            raise ShardError(f"{self.index}: its numbers are of type {code}, and tokens are whole numbers")
        wanted = _HEAD.size + 12 * sequences + 8 * ends
        if size == wanted + sequences and sequences:
            raise ShardError(f"{self.index}: is multimodal, and only texts are read")
        if size != wanted:
            raise ShardError(f"{self.index}: has {size} bytes, and {wanted} by its head: it is cut off or damaged")
        return code, sequences, ends

    def _checked_ends(self) -> int:
        ends, last = self._firsts, self._sequences - 1
        if not len(ends) or ends[0] != 0 or ends[-1] != self._sequences:
            raise ShardError(f"{self.index}: its documents do not end with its sequences: it is damaged")
        size = 0 if last < 0 else int(self._places[last]) + int(self._lengths[last]) * self.dtype.itemsize
        if size != self.version.size or (last >= 0 and self._places[0] != 0):
            raise ShardError(
                f"{self.path}: has {self.version.size} bytes, and {size} by {self.index.name}: it is cut off, or the "
                "two files are not of one data set"
            )
        return size // self.dtype.itemsize
