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
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

from safetensors import SafetensorError, safe_open

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
    """A key of DTYPES."""


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
    """Return the shape of the stack in `transformers`, whose matrices are transposed."""
    matrices, rows, count, size = blocks
    return matrices, 2 * count * size, rows


def unpacked(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with stacks in MXFP4 as one tensor in bf16, which has no place in a file."""
    entries = dict(tensors)
    for name, (blocks, scales) in packed_stacks({name: entry.shape for name, entry in tensors.items()}).items():
        entries[name] = Entry(0, unpacked_shape(entries.pop(blocks).shape), "BF16")
        del entries[scales]
    return entries


QUANTIZED = ".quant_state.bitsandbytes__nf4"
"""End of the name of a tensor that describes a weight in NF4, as JSON in bytes."""


def quantized_weights(
    tensors: Mapping[str, tuple[Path, Entry]],
) -> dict[str, tuple[tuple[int, ...], dict[str, tuple[Path, Entry]]]]:
    """Return {name of a weight that bitsandbytes has quantized to NF4: (its shape, its tensors by name)}.

    Raises:
        UserError: blocks of NF4 have another size than those of `transformers`, 64 numbers.
    """
    weights = {}
    for state, (path, entry) in tensors.items():
        if not state.endswith(QUANTIZED):
            continue
        name = state.removesuffix(QUANTIZED)
        with _named(path, name), path.open("rb") as file:
            file.seek(entry.begin)
            facts = parsed(file.read(prod(entry.shape)))
            if "shape" not in facts or facts.get("blocksize") != 64:
                raise Unreadable(f"has NF4 blocks of {facts.get('blocksize')} numbers, and 64 are read")
        weights[name] = (
            tuple(facts["shape"]),
            {part: tensors[part] for part in tensors if part == name or part.startswith(f"{name}.")},
        )
    return weights


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


DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""dtypes that are read: torch's names, by those of safetensors."""
MOST_BYTES = 100_000_000
"""Maximum bytes of an index; the safetensors library (0.8) has the same limit for a header."""


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
    try:
        with safe_open(path, "numpy"):  # checks dtypes, shapes and places of all tensors
            pass
    except SafetensorError as error:
        raise Unreadable(f"is damaged ({error})") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parsed(file.read(length))
    header.pop("__metadata__", None)
    if other := next((name for name, entry in header.items() if entry["dtype"] not in DTYPES), None):
        raise Unreadable(f"has {other} with dtype {header[other]['dtype']}, which cannot be read")
    return {
        name: Entry(8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


def parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises Unreadable for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is damaged ({error})") from error
    if not isinstance(content, dict):
        raise Unreadable("is damaged, it holds no mapping")
    return content


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
        dtype = next((name for name, torch_name in DTYPES.items() if tensor.dtype == getattr(torch, torch_name)), None)
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
