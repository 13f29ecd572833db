"""Index of a checkpoint's files and tensors, as JSON.

The content is not trusted: names, numbers and positions are checked against each other and the files before any tensor
is read or allocated.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.spans import Span

VERSION = 1
BLOCK = 4 * 2**20
"""Bytes per hashed block of a file."""
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U64": 8, "U32": 4, "U8": 1, "BOOL": 1}
"""Bytes per element, by safetensors dtype name."""
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "U64": "uint64",
    "U32": "uint32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names in torch, by safetensors dtype name."""
_FILE = re.compile(r"rank_\d{5}\.safetensors")
_LARGEST = 2**62
_DIMENSIONS = 8


class Key(NamedTuple):
    """Name of a tensor."""

    module: str
    name: str
    state: str
    """WEIGHT, or a state of the optimizer."""


WEIGHT = "weight"
_OF_RANK = re.compile(r"rank_\d{5}")


def is_of_rank(key: Key) -> bool:
    """True if it belongs to a rank (random generators, for example) and not to a module."""
    return _OF_RANK.fullmatch(key.module) is not None


@dataclass(frozen=True)
class File:
    """A file of one rank."""

    name: str
    size: int
    """Size in bytes."""
    header: int
    """Header size in bytes, before the tensors."""
    hashes: tuple[str, ...]
    """xxh3_128 in hexadecimal: of the header, then of each BLOCK bytes after it."""


@dataclass(frozen=True)
class Piece:
    """A span of a tensor in a file."""

    file: int
    """Position in the index's list of files."""
    at: int
    """First byte, counted from the end of the header."""
    span: Span


@dataclass
class Index:
    """All files and tensors of a checkpoint."""

    files: list[File] = field(default_factory=list)
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)

    def shape(self, key: Key) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self.pieces[key][0].span.shape

    def nbytes(self, key: Key) -> int:
        """Return the bytes of a whole tensor."""
        return prod(self.shape(key)) * SIZES[self.dtypes[key]]

    def add(self, key: Key, dtype: str, piece: Piece) -> None:
        """Add a piece of a tensor. Raises Damage if its other pieces have another shape or dtype."""
        if self.dtypes.setdefault(key, dtype) != dtype:
            raise Damage(f"{' '.join(key)} is {dtype} in one file and {self.dtypes[key]} in another")
        pieces = self.pieces.setdefault(key, [])
        if pieces and pieces[0].span.shape != piece.span.shape:
            raise Damage(
                f"{' '.join(key)} has shape {piece.span.shape} in one file and {pieces[0].span.shape} in another"
            )
        pieces.append(piece)

    def require_whole(self) -> None:
        """Require that every element of every tensor exists once.

        Raises:
            Damage: an element is missing or duplicated.
        """
        for key, pieces in self.pieces.items():
            _require_apart(key, [piece.span for piece in pieces])
            count, expected = sum(piece.span.numel for piece in pieces), prod(self.shape(key))
            if count != expected:
                raise Damage(f"{' '.join(key)} has {count} of its {expected} elements")

    def dump(self) -> bytes:
        """Return the index as JSON."""
        tensors: dict[str, dict[str, Any]] = {}
        for key, pieces in self.pieces.items():
            named = tensors.setdefault(key.module, {}).setdefault(key.name, {"shape": self.shape(key), "states": {}})
            places = [[p.file, p.at, p.span.offset, p.span.size, p.span.start, p.span.stop] for p in pieces]
            named["states"][key.state] = {"dtype": self.dtypes[key], "pieces": places}
        files = [[file.name, file.size, file.header, file.hashes] for file in self.files]
        content = {"version": VERSION, "block": BLOCK, "files": files, "tensors": tensors}
        return json.dumps(content, separators=(",", ":")).encode()

    def join(self, other: "Index") -> None:
        """Add the files and pieces of another index. Raises Damage if the two disagree about a tensor."""
        before = len(self.files)
        self.files += other.files
        for key, pieces in other.pieces.items():
            for piece in pieces:
                self.add(key, other.dtypes[key], replace(piece, file=before + piece.file))

    @classmethod
    def load(cls, text: bytes, *, whole: bool = True) -> "Index":
        """Return an index from JSON.

        Args:
            whole: True to require every element of every tensor.

        Raises:
            Damage: it is not an index, or has impossible content.
        """
        try:
            content = json.loads(text)
            version = content["version"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise Damage("is no index") from error
        if version != VERSION or content.get("block") != BLOCK:
            raise Damage(f"is of version {version!r}, this program reads {VERSION}")
        index = cls()
        try:
            index.files = [_file(*entry) for entry in content["files"]]
            for key, dtype, piece in _pieces(content["tensors"]):
                index._require_inside(key, dtype, piece)
                index.add(key, dtype, piece)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise error if isinstance(error, Damage) else Damage(f"is no index ({error})") from error
        if len({file.name for file in index.files}) < len(index.files):
            raise Damage("names a file twice")
        if whole:
            index.require_whole()
        return index

    def _require_inside(self, key: Key, dtype: str, piece: Piece) -> None:
        span = piece.span
        fits = len(span.shape) == len(span.offset) == len(span.size) <= _DIMENSIONS and all(
            offset + size <= of for offset, size, of in zip(span.offset, span.size, span.shape, strict=True)
        )
        ranges = 0 <= span.start < span.stop <= prod(span.size)
        aligned = piece.at % SIZES[dtype] == 0
        if not fits or not ranges or not aligned or not piece.file < len(self.files):
            raise Damage(f"{' '.join(key)} has a piece that is not in it")
        file = self.files[piece.file]
        if file.header + piece.at + span.numel * SIZES[dtype] > file.size:
            raise Damage(f"{' '.join(key)} is said to reach beyond the end of {file.name}")


def _file(name: Any, size: Any, header: Any, hashes: Any) -> File:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise Damage(f"names a file {name!r}")
    blocks = -(-(_number(size) - _number(header)) // BLOCK)
    if len(hashes) != 1 + blocks or not all(isinstance(value, str) and len(value) == 32 for value in hashes):
        raise Damage(f"has {len(hashes)} hashes of {name}, not {1 + blocks}")
    return File(name, size, header, tuple(hashes))


def _pieces(tensors: Mapping[str, Any]) -> Iterator[tuple[Key, str, Piece]]:
    for module, names in tensors.items():
        for name, tensor in names.items():
            shape = _sizes(tensor["shape"])
            for state, stored in tensor["states"].items():
                dtype = stored["dtype"]
                if dtype not in SIZES:
                    raise Damage(f"has elements of type {dtype!r}")
                for file, at, offset, size, start, stop in stored["pieces"]:
                    span = Span(shape, _sizes(offset), _sizes(size), _number(start), _number(stop))
                    yield Key(module, name, state), dtype, Piece(_number(file), _number(at), span)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Damage(f"has {value!r} for sizes")
    return tuple(map(_number, value))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise Damage(f"has {value!r} for a number")
    return value


def _require_apart(key: Key, spans: list[Span]) -> None:
    """Require that boxes of a tensor are equal or disjoint, and that ranges of a box are disjoint."""
    by_box: dict[tuple, list[tuple[int, int]]] = {}
    for span in spans:
        by_box.setdefault(span.box, []).append((span.start, span.stop))
    twice = any(stop > start for ranges in by_box.values() for (_, stop), (start, _) in pairwise(sorted(ranges)))
    boxes = sorted(by_box)
    for number, (offset, size) in enumerate(boxes):
        for other, other_size in boxes[number + 1 :]:
            twice |= all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, other_size, strict=True))
    if twice:
        raise Damage(f"{' '.join(key)} has elements that are there twice")
