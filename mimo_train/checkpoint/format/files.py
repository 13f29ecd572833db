"""The files of a checkpoint, and whether it is complete. Imports no torch.

rank_00000.safetensors ...   what each rank holds
index.json                   what is where in them
run.json                     the run's own record
COMPLETE                     sizes and hashes of the two, written last

In object storage, where no folder can be renamed, also a mark: PARTIAL while it is written or removed, and DAMAGED
where a run has set it aside.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from data.errors import ReadError
from data.storage.files import retrying
from data.storage.stores import read_range, store_of
from data.storage.url import ObjectMeta, Place, Url
from mimo_train.checkpoint.format.durable import digest, write_file

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
