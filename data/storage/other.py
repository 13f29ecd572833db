"""Everything that fsspec has a file system for (hf://, sftp://, memory://, ...), to be read. It is slower than
`objects`, and most of its file systems cannot tell whether a file changes: size and time are compared where they are
known.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import fsspec

from data.errors import DataError
from data.storage.base import Changed, Found, named
from data.storage.url import OBJECTS, Url

_TAGS = ("ETag", "etag", "sha256", "md5Hash", "blob_id", "uid", "checksum")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "created")


AT_ONCE = 8
"""Connections to one host."""
LOOK, LIST = 60.0, 300.0
"""Seconds for a look at a file, and for a list of a folder; connecting is included."""


class OtherStore:
    """A file system of fsspec; see `base.Store`. It is not written to. It is connected to at its first use, and then
    raises DataError where it takes more than a URL says.

    Raises:
        DataError: fsspec knows none of this scheme.
        ImportError: it needs a library that is not installed.
    """

    def __init__(self, url: Url) -> None:
        try:
            self._kind: Any = fsspec.get_filesystem_class(url.scheme)
        except ValueError as error:
            known = ", ".join(f"{scheme}://" for scheme in (*OBJECTS, "http", "https", "hf"))
            raise DataError(f"{url}: no file system of this scheme: give a path, or {known}, ... ({error})") from error
        self._host = f"{url.scheme}://{url.host}"
        # What stands before a path: the host is part of it in some file systems, and in others not.
        self._before = self._kind._strip_protocol(f"{self._host}/x").removesuffix("x")
        self._places, self._free = threading.Semaphore(AT_ONCE), list[Any]()

    def list(self, folder: Url, *, deep: bool = True) -> Iterator[Found]:
        find = partial(self._call, folder, "find", maxdepth=None if deep else 1, detail=True)
        found = _in_time(find, folder, LIST)
        for name, about in sorted(found.items()):
            one = _found(Url(folder.scheme, folder.host, self._within(name)), about)
            # A list may tell times in another way than a look.
            yield one if _tag(about) else replace(one, tag="")

    def look(self, url: Url) -> Found:
        return _in_time(partial(self._look, url), url, LOOK)

    def _look(self, url: Url) -> Found:
        about = self._call(url, "info")
        if about.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", str(url))
        return _found(url, about)

    async def read(self, url: Url, start: int, size: int, tag: str = "") -> memoryview:
        return await asyncio.wrap_future(_begun(partial(self._read, url, start, size, tag)))

    def _read(self, url: Url, start: int, size: int, tag: str) -> memoryview:
        found = self._look(url)
        if tag and found.tag != tag:
            raise Changed(url)
        last = min(start + size, found.size)
        if start >= last:
            return memoryview(b"")
        content = self._call(url, "cat_file", start=start, end=last)
        if len(content) != last - start:
            raise OSError(errno.EIO, f"{len(content)} bytes came for {last - start}", str(url))
        return memoryview(content)

    def _call(self, url: Url, method: str, **arguments: Any) -> Any:
        """What a method of the file system returns for a place, its errors as those of files. It may wait for ever."""
        path = self._before + url.path if url.path else self._before.rstrip("/") or self._before
        try:
            with self._connected() as files:
                return getattr(files, method)(path, **arguments)
        except DataError:
            raise
        except Exception as error:
            raise _as_of_files(error, url) from error

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A file system that nobody else uses meanwhile: reads side by side on one connection of FTP get each other's
        bytes. After an error it is not used again."""
        with self._places:
            try:
                files = self._free.pop()
            except IndexError:
                files = self._connect()
            yield files
            self._free.append(files)

    def _connect(self) -> Any:
        """The file system with the host, port and so on that a URL has, and what the settings of fsspec add."""
        try:
            return fsspec.url_to_fs(self._host, skip_instance_cache=True)[0]
        except (TypeError, ValueError) as error:
            scheme = self._host.partition(":")[0].upper()
            raise DataError(
                f"{self._host}: its file system of fsspec needs more than that ({error}): give each argument by the "
                f"environment, as FSSPEC_{scheme}_ARGUMENT"
            ) from error

    def _within(self, name: str) -> str:
        """The path in a URL, of a name that the file system gives."""
        return name.strip("/").removeprefix(self._before.strip("/")).strip("/")

    def put(self, url: Url, content: bytes, *, new: bool = False, instead_of: str = "") -> str:
        raise _read_only(url)

    def upload(self, url: Url, parts: Iterable[bytes | memoryview], size: int) -> int:
        raise _read_only(url)

    def remove(self, urls: Iterable[Url]) -> None:
        raise _read_only(next(iter(urls)))


def _begun[Result](work: Callable[[], Result]) -> Future[Result]:
    """What `work` returns, done in a thread that nobody has to wait for, also at the end of the process: some file
    systems wait for ever."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="storage of fsspec", daemon=True).start()
    return future


def _in_time[Result](work: Callable[[], Result], url: Url, seconds: float) -> Result:
    future = _begun(work)
    wait([future], seconds)
    if not future.done():
        raise OSError(errno.ETIMEDOUT, f"no answer in {seconds:g} seconds", str(url))
    return future.result()


def _found(url: Url, about: dict[str, Any]) -> Found:
    time = next((about[key] for key in _TIMES if about.get(key)), 0)
    modified = time.timestamp() if isinstance(time, datetime) else float(time) if isinstance(time, int | float) else 0.0
    size = about.get("size")
    if size is None:
        raise OSError(errno.EOPNOTSUPP, "its size is not known", str(url))
    return Found(url, int(size), _tag(about) or f"{size} {time}", modified)


def _tag(about: dict[str, Any]) -> str:
    return next((str(about[key]) for key in _TAGS if about.get(key)), "")


def _read_only(url: Url) -> OSError:
    schemes = ", ".join(f"{scheme}://" for scheme in OBJECTS)
    return OSError(errno.EROFS, f"only {schemes} are written", str(url))


def _as_of_files(error: Exception, url: Url) -> OSError:
    if isinstance(error, OSError) and error.errno:
        return named(error, url, error.errno)
    return named(error, url, errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO)
