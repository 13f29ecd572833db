"""Writes that have reached the disk when they return. Imports no torch."""

import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from mimo_train.flight.recorder import RECORDER

FLUSHED = 2**28
"""Bytes after which a file is flushed: one flush of a large file takes minutes without a sign of progress."""


def digest(data: bytes | memoryview) -> str:
    """The hash that checkpoints use: it finds damage, and is no protection against an author."""
    return xxh3_128_hexdigest(data)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of it to an open file: one call may write less."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a new file and flush it; returns its size. The file is removed if that fails. What reaches the disk
    meanwhile, FLUSHED bytes at a time, is a sign of progress."""
    size, file = 0, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        # In a thread, which begins with the first flush: what comes next is made and written meanwhile.
        with ThreadPoolExecutor(1, "flush") as thread:
            flushed, flush = 0, Future[None]()
            flush.set_result(None)
            for piece in _pieces(parts):
                write_all(file, piece)
                size += len(piece)
                if size - flushed >= FLUSHED:
                    flush.result()
                    RECORDER.tick()
                    flushed, flush = size, thread.submit(os.fdatasync, file)
            flush.result()
            RECORDER.tick()
        os.fsync(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    return size


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The parts, those above FLUSHED bytes in several."""
    for part in parts:
        left = memoryview(part)
        while left:
            yield left[:FLUSHED]
            left = left[FLUSHED:]


def put_in_place(new: Path, final: Path) -> None:
    """Give a folder its final name. One that has this name is replaced, and removed only after the new one is on the
    disk in its place: a kill leaves one of the two, under its name or under one that `folders.finish_renames` knows.

    Raises:
        OSError: the folder that was there still is.
    """
    old: Path | None = None
    if not final.exists():
        os.rename(new, final)
    elif _exchange(new, final):
        old = new
    else:
        old = old_name(final)
        os.rename(final, old)
        try:
            os.rename(new, final)
        except OSError:
            os.rename(old, final)
            raise
    flush_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def old_name(final: Path) -> Path:
    """Name of a folder that is being replaced, while neither has the final one."""
    return final.with_suffix(".old.partial")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
