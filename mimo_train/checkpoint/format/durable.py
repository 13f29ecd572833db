"""Writes that have reached the disk when they return. Imports no torch."""

import os
from collections.abc import Iterable
from pathlib import Path

from xxhash import xxh3_128_hexdigest


def digest(data: bytes | memoryview) -> str:
    """The hash that checkpoints use: it finds damage, and is no protection against an author."""
    return xxh3_128_hexdigest(data)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of it to an open file: one call may write less."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a new file and flush it; returns its size. The file is removed if that fails."""
    size, file = 0, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for part in parts:
            write_all(file, part)
            size += len(part)
        os.fsync(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    return size


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
