"""The files of a checkpoint: names, durable writes, and completeness.

rank_00000.safetensors ...   each rank's tensors
index.json                   positions of all tensors
run.json                     the run's record
COMPLETE                     sizes and hashes of the two, written last
PARTIAL                      exists during a write or removal
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from data.errors import ReadError
from data.storage.files import retrying
from data.storage.object_store import read_range, store_of
from data.storage.url import ObjectMeta, Place, Url
from mimo_train.flight.recorder import RECORDER

INDEX, COMPLETE, PARTIAL = "index.json", "COMPLETE", "PARTIAL"
MOST_MARKER = 100_000
"""Largest size of a marker, which has about 150 bytes."""

RETRIES = 4
"""Retries of a read after a file system error: 7.5 seconds with pauses."""


class Damage(ValueError):
    """A file of a checkpoint is not what was written."""


def of_rank(rank: int) -> tuple[str, str]:
    """Return the names of a rank's file and of its listing, which exists until all ranks have written."""
    return f"rank_{rank:05d}.safetensors", f"rank_{rank:05d}.json"


def write_marker(folder: Place, files: Mapping[str, bytes]) -> None:
    """Mark a folder as complete."""
    marker = json.dumps({name: [len(content), digest(content)] for name, content in files.items()}).encode()
    if isinstance(folder, Url):
        write_file(folder / COMPLETE, [marker])
        return
    new = folder / f"{COMPLETE}.new"
    write_file(new, [marker])
    os.rename(new, folder / COMPLETE)
    flush_folder(folder)


def marked_file(folder: Place, name: str) -> bytes:
    """Return the content of a file that the marker names.

    Raises:
        Damage: it is missing, or not what was written.
        OSError: it cannot be read, even after retries.
    """
    marker = patiently(partial(read_file, folder / COMPLETE, at_most=MOST_MARKER), folder / COMPLETE)
    try:
        size, expected = json.loads(marker)[name]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Damage(f"{COMPLETE} does not name {name}") from error
    if not isinstance(size, int):
        raise Damage(f"{COMPLETE} has no size for {name}")
    content = patiently(partial(read_file, folder / name, at_most=size), folder / name)
    if len(content) != size or digest(content) != expected:
        raise Damage(f"{name} is not what {COMPLETE} says: it has {len(content)} bytes")
    return content


def patiently[Result](read: Callable[[], Result], path: Place) -> Result:
    """Return the result of `read`, retried after file system errors: they are no damage.

    Raises:
        OSError: it failed each time, or for a permanent reason.
    """
    try:
        return retrying(read, f"{path}: cannot read it", RETRIES)
    except ReadError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def read_file(path: Place, at_most: int | None = None) -> bytes:
    """Return the content of a small file.

    Args:
        at_most: largest size in bytes.

    Raises:
        Damage: it is missing, too large, or not a regular file.
        OSError: it cannot be read.
    """
    if isinstance(path, Url):
        return _read_object(path, at_most)
    with os.fdopen(open_file(path), "rb") as file:
        _require_at_most(path, os.fstat(file.fileno()).st_size, at_most)
        return file.read()


def read_files(paths: Sequence[Place]) -> Iterator[bytes]:
    """Yield the contents of small files in order; errors as in `read_file`."""
    if any(isinstance(path, Url) for path in paths):  # in parallel: requests have latency
        with ThreadPoolExecutor(16) as pool:
            yield from pool.map(read_file, paths)
    else:
        yield from map(read_file, paths)


def _read_object(url: Url, at_most: int | None) -> bytes:
    try:
        meta = store_of(url).look(url)
    except FileNotFoundError:
        raise Damage(f"{url.name} is missing") from None
    _require_at_most(url, meta.size, at_most)
    return bytes(read_range(url, 0, meta.size, meta.tag))


def _require_at_most(path: Place, size: int, at_most: int | None) -> None:
    if at_most is not None and size > at_most:
        raise Damage(f"{path.name} has {size} bytes, not {at_most}")


def objects_in(folder: Url) -> dict[str, ObjectMeta]:
    """Return the objects in a folder, by name. Raises OSError if they cannot be listed."""
    return {item.url.name: item for item in store_of(folder).list(folder, deep=False)}


def require_size(path: Place, size: int, objects: Mapping[str, ObjectMeta] | None = None) -> None:
    """Check a file's size. It opens the file: network file systems may report an old size otherwise.

    Args:
        objects: for an object, the contents of its folder by name; None requests this one.

    Raises:
        Damage: it is missing or has another size.
    """
    if isinstance(path, Url):
        try:
            actual = (store_of(path).look(path) if objects is None else objects[path.name]).size
        except (FileNotFoundError, KeyError):
            raise Damage(f"{path.name} is missing") from None
    else:
        with os.fdopen(open_file(path), "rb") as file:
            actual = os.fstat(file.fileno()).st_size
    if actual != size:
        raise Damage(f"{path.name} has {actual} bytes, not {size}")


def open_file(path: Path) -> int:
    """Return a descriptor for reading a file. Opening a FIFO in its place does not block.

    Raises:
        Damage: it is missing, or not a regular file.
        OSError: it cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damage(f"{path.name} is no file")
    return file


FLUSHED = 2**28
"""Bytes after which a file is flushed: one flush of a large file takes minutes without a sign of progress."""

IN_ONE = 2**23
"""Largest object in bytes that is written by a single request."""


def digest(data: bytes | memoryview) -> str:
    """Return the hash of some bytes; it detects damage but not tampering."""
    return xxh3_128_hexdigest(data)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write all data to an open file: a single call may write less."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def write_file(path: Place, parts: Iterable[bytes | memoryview], nbytes: int = 0) -> int:
    """Write and flush a new file and return its size; remove it on failure.

    Every FLUSHED bytes on disk count as a sign of progress.

    Args:
        nbytes: approximate size if it is large; it decides how an object is uploaded.
    """
    if isinstance(path, Url):
        return _write_object(path, parts, nbytes)
    size, file = 0, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        # Flush in a thread: the next parts are made and written meanwhile.
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
    for part in parts:
        left = memoryview(part)
        while left:
            yield left[:FLUSHED]
            left = left[FLUSHED:]


def remove_files(paths: Sequence[Place]) -> None:
    """Remove files of one folder; missing ones are ignored. Folders, such as a user's export, go with their content."""
    urls = [path for path in paths if isinstance(path, Url)]
    if urls:
        store_of(urls[0]).remove(urls)
    for path in paths:
        if isinstance(path, Path) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif isinstance(path, Path):
            path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, with their names on disk. Another process may have just created some of the
    parents, so all readable ones of this file system are flushed."""
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
    """Flush the names in a folder to disk."""
    if isinstance(folder, Url):
        return
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
