"""The weight files of a directory, and the location and shape of their tensors. Only headers are read.

Files are chosen as in `transformers`: one safetensors file, else those of its index, else one `.bin` file, else those
of its index. torch is imported only for `.bin` files.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

from data.storage.files import POINTER_ERROR, POINTER_REMEDY, is_lfs_pointer
from mimo_train.config.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BIN_INDEX, BIN = "pytorch_model.bin.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    begin: int
    """Offset of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """A key of SIZES."""


def packed_stacks(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, str]]:
    """Return {name of a stack of matrices: names of its tensors} for those in MXFP4 (OCP Microscaling Formats 1.0):
    NAME_blocks [matrices, rows, blocks, bytes] has two numbers in a byte, NAME_scales a scale for each block."""
    names = {name.removesuffix("_blocks"): shape for name, shape in shapes.items() if name.endswith("_blocks")}
    return {
        name: (f"{name}_blocks", f"{name}_scales")
        for name, shape in names.items()
        if len(shape) == 4 and shapes.get(f"{name}_scales") == shape[:3]
    }


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape that `transformers` gives such a stack, whose matrices are transposed."""
    matrices, rows, count, size = blocks
    return matrices, 2 * count * size, rows


def unpacked(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with stacks in MXFP4 as one tensor in bf16, which has no place in a file."""
    entries = dict(tensors)
    for name, (blocks, scales) in packed_stacks({name: entry.shape for name, entry in tensors.items()}).items():
        entries[name] = Entry(0, unpacked_shape(entries.pop(blocks).shape), "BF16")
        del entries[scales]
    return entries


def stored_tensors(folder: Path, key: str) -> dict[str, tuple[Path, Entry]]:
    """Return the tensors of a directory by name, each with its file.

    Args:
        key: config key that names the directory, for errors.

    Raises:
        UserError: the directory has no weights, or a file is missing, truncated, a Git-LFS pointer, or contradicts its
            header or the index.
    """
    tensors: dict[str, tuple[Path, Entry]] = {}
    files, index = _files(folder, key)
    for name, indexed in files.items():
        path = folder / name
        for tensor, entry in _stored_in(path, indexed, index, key).items():
            if tensor in indexed or tensor not in tensors:  # the index decides about a tensor in several files
                tensors[tensor] = path, entry
    return tensors


def _files(folder: Path, key: str) -> tuple[dict[str, set[str]], str]:
    """Return file -> tensors that the index has in it, and the name of the index."""
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        if (folder / single).is_file():
            return {single: set()}, index
        if (folder / index).is_file():
            return indexed_files(folder / index, key), index
    for pattern, index in (("model-*.safetensors", INDEX), ("pytorch_model-*.bin", BIN_INDEX)):
        shards = sorted(path.name for path in folder.glob(pattern))
        if shards:
            raise UserError(f"{key}: {folder} has {shards[0]} and no {index}, which names its tensors: copy that too")
    raise UserError(
        f"{key}: {folder} has no weights ({SINGLE}, {INDEX}, {BIN} or {BIN_INDEX}): copy them too, or save the model "
        "with transformers' save_pretrained"
    )


def indexed_files(index: Path, key: str) -> dict[str, set[str]]:
    """Return file -> tensors that an index has in it. Raises UserError if the index is damaged."""
    with _named(index, key):
        require_no_pointer(index)
        if index.stat().st_size > MOST_BYTES:
            raise Unreadable(f"has {index.stat().st_size} bytes, and {MOST_BYTES} are read at most")
        places = parsed(index.read_bytes()).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise Unreadable("has no weight_map of tensors and files")
        files: dict[str, set[str]] = {}
        for tensor, file in places.items():
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\0" in file:
                raise Unreadable(f"has {tensor} in {file!r:.80}, which is no file next to it")
            files.setdefault(file, set()).add(tensor)
    return dict(sorted(files.items()))


def _stored_in(path: Path, indexed: set[str], index: str, key: str) -> dict[str, Entry]:
    if not path.is_file():
        raise UserError(f"{key}: {path} is missing, and {index} names it: copy the directory again")
    with _named(path, key):
        entries = read_bin_header(path) if index == BIN_INDEX else read_header(path)
        absent = next((name for name in sorted(indexed) if name not in entries), None)
        if absent is not None:
            raise Unreadable(f"has no {absent}, which {index} has there")
    return entries


@contextmanager
def _named(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except (Unreadable, OSError) as error:
        raise UserError(f"{key}: {read_error(path, error)}") from error


SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of an element, by dtype."""
MOST_BYTES = 100_000_000
"""Maximum bytes of a header or an index; the safetensors library (0.6) has the same limit."""
_DIMENSIONS = 16


class Unreadable(ValueError):
    """A file with unexpected content; the message is a clause without the file's name."""

    remedy = "copy it again"


def read_error(path: Path, error: Unreadable | OSError) -> str:
    """Return a sentence with the file, the error, and the remedy."""
    return f"{path} {error}: {error.remedy}" if isinstance(error, Unreadable) else f"{path} cannot be read: {error}"


class LfsPointer(Unreadable):
    """A Git-LFS pointer, which a clone without Git LFS has instead of the file."""

    remedy = POINTER_REMEDY

    def __init__(self) -> None:
        super().__init__(POINTER_ERROR)


def require_no_pointer(path: Path) -> None:
    """Raise LfsPointer for a Git-LFS pointer, OSError if the file cannot be read."""
    if is_lfs_pointer(path):
        raise LfsPointer


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name. Nothing larger than the header is allocated.

    Raises:
        Unreadable: it is no safetensors file, is truncated, or a tensor contradicts the header.
        OSError: it cannot be read.
    """
    require_no_pointer(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise Unreadable("is no safetensors file, or was cut short")
        if length > MOST_BYTES:
            raise Unreadable(f"says that its header has {length} bytes, and {MOST_BYTES} are read at most")
        header = parsed(file.read(length))
    header.pop("__metadata__", None)
    entries, places = {}, []
    for name, entry in header.items():
        begin, end, entries[name] = _entry(name, entry, 8 + length, size)
        places.append((begin, end, name))
    at = 8 + length
    for begin, end, name in sorted(places):
        if begin != at:
            raise Unreadable(f"says that {name} begins at byte {begin}, and what is before it ends at {at}")
        at = end
    if at != size:
        raise Unreadable(f"has {size} bytes, and its last tensor ends at {at}")
    return entries


def parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises Unreadable for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is damaged ({error})") from error
    if not isinstance(content, dict):
        raise Unreadable("is damaged, it holds no mapping")
    return content


def _entry(name: str, entry: Any, first: int, size: int) -> tuple[int, int, Entry]:
    if not isinstance(entry, dict):
        raise Unreadable(f"holds no tensor as {name}, but {type(entry).__name__}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise Unreadable(f"has {name} with dtype {_short(dtype)}, which cannot be read")
    if not _are_integers(shape) or len(shape) > _DIMENSIONS:
        raise Unreadable(f"has {name} with the shape {_short(shape)}")
    if not _are_integers(offsets) or len(offsets) != 2:
        raise Unreadable(f"has {name} with the data_offsets {_short(offsets)}")
    begin, end = (first + offset for offset in offsets)
    if end > size:
        raise Unreadable(f"has {size} bytes, and {name} ends at {end}")
    nbytes = prod(shape) * SIZES[dtype]
    if end - begin != nbytes:
        raise Unreadable(f"has {end - begin} bytes of {name}, and {_short(shape)} of {dtype} takes {nbytes}")
    return begin, end, Entry(begin, tuple(shape), dtype)


def _are_integers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _short(value: Any) -> str:
    """Return a value for a message; nested values may be huge."""
    text = json.dumps(value)[:81] if not isinstance(value, (dict, list)) or len(value) < 20 else type(value).__name__
    return text if len(text) < 81 else f"{text[:77]}..."


_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""dtypes of safetensors, by torch's names."""


class Unsupported(Unreadable):
    """A torch file with unsupported content."""

    remedy = "load it with the library that wrote it, and save it as safetensors"


def read_bin_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name.

    Raises:
        Unreadable: it is damaged, holds anything but tensors, or has torch's format from before version 1.6.
        OSError: it cannot be read.
    """
    require_no_pointer(path)
    try:
        if not is_zipfile(path):
            raise Unsupported("was cut short, or is no file of torch.save since version 1.6")
        with ZipFile(path) as file:
            is_plain = all(member.compress_type == ZIP_STORED for member in file.infolist())
    except (BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        raise Unreadable(f"is damaged ({error})") from error
    if not is_plain:
        raise Unsupported("has compressed members")
    import torch

    try:
        tensors = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsupported("holds more than tensors, which is not unpickled (weights_only=True)") from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise Unreadable(f"is damaged ({str(error).splitlines()[0] if str(error) else error!r})") from error
    if not isinstance(tensors, dict) or not tensors:
        raise Unsupported(f"holds {type(tensors).__name__}, expected tensors by name")
    size, entries = path.stat().st_size, {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Unsupported(f"holds {type(tensor).__name__} as {name!r:.80}, expected a tensor")
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or not tensor.is_contiguous():
            raise Unsupported(f"has {name} as {tensor.dtype} with strides {tensor.stride()}")
        # torch records the offset of a storage in the file.
        begin = tensor.untyped_storage()._checkpoint_offset
        assert begin is not None, name
        begin += int(tensor.storage_offset()) * tensor.element_size()
        if begin + tensor.nbytes > size:
            raise Unreadable(f"has {size} bytes, and {name} ends at {begin + tensor.nbytes}")
        entries[name] = Entry(begin, tuple(tensor.shape), dtype)
    return entries
