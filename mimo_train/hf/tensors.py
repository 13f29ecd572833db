"""Read parts of tensors from a safetensors directory, and write files one tensor at a time.

`config.pretrained.weight_files` describes the format. Files are read by `pread`: pages of a mapped file would count as
process memory while it is open.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.weight_files import DTYPES as TORCH_NAMES
from mimo_train.config.pretrained.weight_files import (
    INDEX,
    SINGLE,
    packed_stacks,
    quantized_weights,
    stored_tensors,
    unpacked_shape,
)
from mimo_train.models.lora.quantized import dequantized_tensor

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in TORCH_NAMES.items()}
"""Torch dtypes by their names in a header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 8 * 2**20
"""Bytes per read."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    begin: int
    """Offset of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFolder:
    """The tensors of a directory by name.

    Raises:
        UserError: the directory has no safetensors, or a file is missing, truncated, or inconsistent with its header or
            the index.
    """

    def __init__(self, folder: Path, key: str):
        """Find the tensors.

        Args:
            key: config key that names the directory, for errors.
        """
        self.folder, self._key = folder, key
        stored = stored_tensors(folder, key)
        self.tensors = {
            name: Stored(path, entry.begin, entry.shape, DTYPES[entry.dtype]) for name, (path, entry) in stored.items()
        }
        pairs = packed_stacks({name: stored.shape for name, stored in self.tensors.items()})
        self.packed = {
            name: (self.tensors.pop(blocks), self.tensors.pop(scales)) for name, (blocks, scales) in pairs.items()
        }
        """Blocks and scales of stacks in MXFP4, whose matrices `transposed_rows` reads."""
        for name, (blocks, _) in self.packed.items():
            self.tensors[name] = Stored(blocks.file, blocks.begin, unpacked_shape(blocks.shape), torch.bfloat16)

        self._quantized: dict[str, dict[str, Stored]] = {}
        """The tensors of weights that bitsandbytes has quantized to NF4, which are read in fp32."""
        for name, (shape, parts) in quantized_weights(stored).items():
            self._quantized[name] = {
                "weight" if part == name else part.removeprefix(f"{name}."): self.tensors.pop(part) for part in parts
            }
            self.tensors[name] = Stored(self._quantized[name]["weight"].file, 0, shape, torch.float32)
        self._dequantized: dict[str, torch.Tensor] = {}

    @property
    def is_quantized(self) -> bool:
        """True if bitsandbytes has quantized some of the weights."""
        return bool(self._quantized)

    def _value(self, stored: Stored) -> torch.Tensor:
        with stored.file.open("rb", buffering=0) as file:
            return self._read(file.fileno(), stored, 0, prod(stored.shape) * stored.dtype.itemsize).view(stored.shape)

    def _full(self, name: str) -> torch.Tensor:
        """Return a weight that the directory has quantized. The last three are kept: queries, keys and values of one
        layer are read in turns."""
        if name not in self._dequantized:
            parts = {part: self._value(stored) for part, stored in self._quantized[name].items()}
            self._dequantized[name] = dequantized_tensor(parts)
            if len(self._dequantized) > 3:
                del self._dequantized[next(iter(self._dequantized))]
        return self._dequantized[name]

    def rows(self, name: str, first: int, count: int, columns: tuple[int, int] | None = None) -> Iterator[torch.Tensor]:
        """Yield rows `first` to `first + count` in chunks of at most CHUNK bytes: [rows, columns], in the file's dtype.

        A row is an entry of the first dimension.

        Args:
            columns: first and last + 1 of the entries of each row to yield; default: all.
        """
        stored = self.tensors[name]
        if name in self._quantized:
            begin, end = columns or (0, stored.shape[1])
            yield self._full(name)[first : first + count, begin:end]
            return
        yield from self._rows(stored, prod(stored.shape[1:]), first, count, columns)

    def stack_rows(
        self, name: str, first: int, count: int, columns: tuple[int, int] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield rows of a tensor that stacks matrices or vectors, numbered consecutively, as `rows`."""
        stored = self.tensors[name]
        yield from self._rows(stored, prod(stored.shape[2:]), first, count, columns)

    def transposed_rows(
        self, name: str, first: int, count: int, columns: tuple[int, int] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield rows of one matrix of a tensor that stacks transposed matrices, as `stack_rows` without transposing."""
        stored = self.tensors[name]
        _, width, height = stored.shape
        matrix, first = divmod(first, height)
        begin, end = columns or (0, width)
        if name in self.packed:
            yield self._unpacked(name, matrix * height + first, count)[:, begin:end]
            return
        read = self._rows(stored, height, matrix * width + begin, end - begin, (first, first + count))
        yield torch.cat([values.contiguous() for values in read]).T

    def _unpacked(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return rows of a stack in MXFP4, numbered consecutively, in bf16."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (
            torch.cat([*self._rows(part, prod(part.shape[2:]), first, count, None)]).view(1, count, *part.shape[2:])
            for part in self.packed[name]
        )
        return convert_moe_packed_tensors(blocks, scales)[0].T

    def _rows(
        self, stored: Stored, width: int, first: int, count: int, columns: tuple[int, int] | None
    ) -> Iterator[torch.Tensor]:
        size = width * stored.dtype.itemsize
        step = max(1, CHUNK // max(1, size))
        with stored.file.open("rb", buffering=0) as file:
            for at in range(first, first + count, step):
                number = min(step, first + count - at)
                values = self._read(file.fileno(), stored, at * size, number * size).view(number, width)
                yield values if columns is None else values[:, columns[0] : columns[1]]

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        assert name not in self.packed, name
        return self._full(name) if name in self._quantized else self._value(self.tensors[name])

    def _read(self, file: int, stored: Stored, begin: int, size: int) -> torch.Tensor:
        buffer = bytearray(size)
        view, read = memoryview(buffer), 0
        while read < size:
            got = os.preadv(file, [view[read:]], stored.begin + begin + read)
            if not got:
                raise UserError(f"{self._key}: {stored.file} was cut short while it was read: copy it again")
            read += got
        return torch.frombuffer(buffer, dtype=stored.dtype) if size else torch.empty(0, dtype=stored.dtype)


@dataclass(frozen=True)
class Planned:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, planned: Iterable[Planned], values: Iterable[torch.Tensor], largest_file: int) -> None:
    """Write tensors as `transformers` does: one file, or several with an index. One tensor is in memory at a time.

    Args:
        planned: all tensors, in writing order.
        values: the tensors; each is requested when the previous ones are on disk.
        largest_file: bytes above which a new file begins.
    """
    files: list[list[Planned]] = [[]]
    for tensor in planned:
        if files[-1] and sum(other.size for other in files[-1]) + tensor.size > largest_file:
            files.append([])
        files[-1].append(tensor)
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    )
    values = iter(values)
    for name, tensors in zip(names, files, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(tensors))
            for tensor in tensors:
                value = next(values)
                assert value.shape == tensor.shape and value.dtype == tensor.dtype, (tensor, value.shape, value.dtype)
                file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
                del value  # free it before the next one is made
    if len(files) > 1:
        places = {tensor.name: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        total = sum(tensor.size for tensors in files for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _header(tensors: list[Planned]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return len(text).to_bytes(8, "little") + text
