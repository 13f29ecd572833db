"""The header of a safetensors file: 8 bytes with its length, then dtype, shape and place of each tensor as JSON.

Nothing in it is believed before it fits the file."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from data.storage.files import POINTER_ERROR, POINTER_REMEDY, is_lfs_pointer

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of an element, by the name of its type."""
MOST_BYTES = 100_000_000
"""Of a header or an index; the safetensors library reads no longer ones either (0.6)."""
_DIMENSIONS = 16


class Unreadable(ValueError):
    """A file is not what it should be; the message is a clause without the file's name."""

    remedy = "copy it again"


def read_error(path: Path, error: Unreadable | OSError) -> str:
    """Return a sentence with the file, what is wrong with it, and what to do."""
    return f"{path} {error}: {error.remedy}" if isinstance(error, Unreadable) else f"{path} cannot be read: {error}"


class LfsPointer(Unreadable):
    """A clone without Git LFS has a short text in the place of the file."""

    remedy = POINTER_REMEDY

    def __init__(self) -> None:
        super().__init__(POINTER_ERROR)


def require_no_pointer(path: Path) -> None:
    """Raises LfsPointer for a Git-LFS pointer, OSError where the file cannot be read."""
    if is_lfs_pointer(path):
        raise LfsPointer


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    begin: int
    """Of its bytes in the file."""
    shape: tuple[int, ...]
    dtype: str
    """A key of SIZES."""


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name. Nothing larger than the header is allocated.

    Raises:
        Unreadable: it is no safetensors file, was cut short, or a tensor is not where and as large as it says.
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
    found, places = {}, []
    for name, entry in header.items():
        begin, end, found[name] = _entry(name, entry, 8 + length, size)
        places.append((begin, end, name))
    at = 8 + length
    for begin, end, name in sorted(places):
        if begin != at:
            raise Unreadable(f"says that {name} begins at byte {begin}, and what is before it ends at {at}")
        at = end
    if at != size:
        raise Unreadable(f"has {size} bytes, and its last tensor ends at {at}")
    return found


def parsed(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises Unreadable where it is none."""
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
    if not _are_whole(shape) or len(shape) > _DIMENSIONS:
        raise Unreadable(f"has {name} with the shape {_short(shape)}")
    if not _are_whole(offsets) or len(offsets) != 2:
        raise Unreadable(f"has {name} with the data_offsets {_short(offsets)}")
    begin, end = (first + one for one in offsets)
    if end > size:
        raise Unreadable(f"has {size} bytes, and {name} ends at {end}")
    nbytes = prod(shape) * SIZES[dtype]
    if end - begin != nbytes:
        raise Unreadable(f"has {end - begin} bytes of {name}, and {_short(shape)} of {dtype} takes {nbytes}")
    return begin, end, Entry(begin, tuple(shape), dtype)


def _are_whole(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**62 for one in value)


def _short(value: Any) -> str:
    """A value in a message; a nested one may be endless."""
    text = json.dumps(value)[:81] if not isinstance(value, (dict, list)) or len(value) < 20 else type(value).__name__
    return text if len(text) < 81 else f"{text[:77]}..."
