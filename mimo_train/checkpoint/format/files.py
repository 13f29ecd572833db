"""The files of a checkpoint: names, durable writes, and whether all are there.

rank_00000.safetensors ...   what each rank holds
index.json                   what is where in them
run.json                     the run's own record
COMPLETE                     sizes and hashes of the two, written last

In object storage, where no folder can be renamed, also a mark: PARTIAL while it is written or removed, and DAMAGED
where a run has set it aside.
"""

import ctypes
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_hexdigest

from data.errors import ReadError
from data.storage.files import retrying
from data.storage.stores import read_range, store_of
from data.storage.url import ObjectMeta, Place, Url
from mimo_train.flight.recorder import RECORDER

INDEX, COMPLETE = "index.json", "COMPLETE"
MOST_MARKER = 100_000
"""Bytes of a marker, which has about 150."""

RETRIES = 4
"""Times that a read is tried again after an error of the file system; with the pauses in between 7.5 seconds."""


class Damage(ValueError):
    """A file of a checkpoint is not what was written."""


def of_rank(rank: int) -> tuple[str, str]:
    """Names of the file of a rank, and of that in which it says what it has written, until all have."""
    return f"rank_{rank:05d}.safetensors", f"rank_{rank:05d}.json"


def write_marker(folder: Place, files: Mapping[str, bytes]) -> None:
    """Mark a folder as complete.

    Args:
        files: contents by name.
    """
    marker = {name: [len(content), digest(content)] for name, content in files.items()}
    write_file(folder / COMPLETE, [json.dumps(marker).encode()])


def marked_file(folder: Place, name: str) -> bytes:
    """A file that the marker names.

    Raises:
        Damage: it is not there, or not what was written.
        OSError: it cannot be read, also when it is tried again.
    """
    marker = patiently(partial(read_file, folder / COMPLETE, at_most=MOST_MARKER), folder / COMPLETE)
    try:
        size, said = json.loads(marker)[name]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Damage(f"{COMPLETE} does not name {name}") from error
    if not isinstance(size, int):
        raise Damage(f"{COMPLETE} has no size for {name}")
    content = patiently(partial(read_file, folder / name, at_most=size), folder / name)
    if len(content) != size or digest(content) != said:
        raise Damage(f"{name} is not what {COMPLETE} says: it has {len(content)} bytes")
    return content


def patiently[Result](read: Callable[[], Result], path: Place) -> Result:
    """What `read` returns, which is done again a few times after an error of the file system: a server that is away for
    a while, or a full table of files, says nothing about what was written.

    Raises:
        OSError: it failed each time, or for a reason that does not pass.
    """
    try:
        return retrying(read, f"{path}: cannot read it", RETRIES)
    except ReadError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def read_file(path: Place, at_most: int | None = None) -> bytes:
    """A small file.

    Args:
        at_most: bytes that it may have; more are not read.

    Raises:
        Damage: it is missing, larger, or no file.
        OSError: it cannot be read.
    """
    if isinstance(path, Url):
        return _read_object(path, at_most)
    with os.fdopen(open_file(path), "rb") as file:
        _require_at_most(path, os.fstat(file.fileno()).st_size, at_most)
        return file.read()


def read_files(paths: Sequence[Place]) -> Iterator[bytes]:
    """Small files, one after the other; errors as of `read_file`."""
    if any(isinstance(path, Url) for path in paths):  # side by side: each answer is on its way for a while
        with ThreadPoolExecutor(16) as pool:
            yield from pool.map(read_file, paths)
    else:
        yield from map(read_file, paths)


def _read_object(url: Url, at_most: int | None) -> bytes:
    try:
        found = store_of(url).look(url)
    except FileNotFoundError:
        raise Damage(f"{url.name} is missing") from None
    _require_at_most(url, found.size, at_most)
    return bytes(read_range(url, 0, found.size, found.tag))


def _require_at_most(path: Place, size: int, at_most: int | None) -> None:
    if at_most is not None and size > at_most:
        raise Damage(f"{path.name} has {size} bytes, not {at_most}")


def objects_in(folder: Url) -> dict[str, ObjectMeta]:
    """The objects in a folder, by name.

    Raises:
        OSError: they cannot be listed.
    """
    return {found.url.name: found for found in store_of(folder).list(folder, deep=False)}


def open_file(path: Path) -> int:
    """A descriptor to read a file of a checkpoint with: to open a FIFO in its place would wait for ever.

    Raises:
        Damage: it is missing, or no file.
        OSError: it cannot be opened.
    """
    try:
        found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise Damage(f"{path.name} is no file")
    return found


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
