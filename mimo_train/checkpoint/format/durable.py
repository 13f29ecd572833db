"""Writes that have reached the disk when they return. Imports no torch."""

import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_hexdigest

from data.storage.stores import store_of
from data.storage.url import Place, Url
from mimo_train.flight.recorder import RECORDER

FLUSHED = 2**28
"""Bytes after which a file is flushed: one flush of a large file takes minutes without a sign of progress."""

IN_ONE = 2**23
"""Bytes up to which an object is written by one request."""

PARTIAL = "PARTIAL"
"""Object in a folder of objects while it is written or removed."""


def digest(data: bytes | memoryview) -> str:
    """The hash that checkpoints use: it finds damage, and is no protection against an author."""
    return xxh3_128_hexdigest(data)


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """The hash of parts one behind the other."""
    hashed = xxh3_128()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all of it to an open file: one call may write less."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def write_file(path: Place, parts: Iterable[bytes | memoryview], nbytes: int = 0) -> int:
    """Write a new file and flush it; returns its size. The file is removed if that fails. What reaches the disk
    meanwhile, FLUSHED bytes at a time, is a sign of progress.

    Args:
        nbytes: about its size, where it is large; it decides how an object is uploaded.
    """
    if isinstance(path, Url):
        return _write_object(path, parts, nbytes)
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


def _write_object(url: Url, parts: Iterable[bytes | memoryview], nbytes: int) -> int:
    RECORDER.tick()
    if nbytes > IN_ONE:
        return store_of(url).upload(url, parts, nbytes)
    content = b"".join(parts)
    store_of(url).put(url, content)
    return len(content)


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The parts, those above FLUSHED bytes in several."""
    for part in parts:
        left = memoryview(part)
        while left:
            yield left[:FLUSHED]
            left = left[FLUSHED:]


def put_in_place(new: Place, final: Place) -> None:
    """Give a folder its final name. One that has this name is replaced, and removed only after the new one is on the
    disk in its place: a kill leaves one of the two, under its name or under one that `folder_changes.finish_renames`
    knows. A folder of objects has its name already, and loses the mark that it is unfinished.

    Raises:
        OSError: the folder that was there still is.
    """
    if isinstance(new, Url) or isinstance(final, Url):
        assert isinstance(new, Url) and new == final, (new, final)
        store_of(new).remove([new / PARTIAL])
        return
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


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where it is not there, with their names on the disk when this returns. Somebody
    else may have made some of them just before, so all of its file system are flushed that this user may read."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    device = folder.stat().st_dev
    for above in folder.absolute().parents:
        if above.stat().st_dev != device:
            break
        with suppress(PermissionError):
            flush_folder(above)


def flush_folder(folder: Place) -> None:
    """Bring the names in a folder to the disk."""
    if isinstance(folder, Url):
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
