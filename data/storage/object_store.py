"""Object storage and web servers through obstore: one client per bucket or server, one I/O thread per process.

Errors are those of files. Credentials, regions and endpoints come from the environment (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, ...). Several threads would each wait for the interpreter next to a busy one; an event loop in one
thread does not (reference measurements: 16 threads 180-290 reads/s, one event loop 1,180-1,575).
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from data.errors import DataError
from data.storage.url import EXTRA, WEB, Changed, ObjectMeta, Url, require_scheme

PART, MOST_PARTS = 16 << 20, 9000
"""Bytes of an upload's part, and its maximum number of parts (S3 allows 10,000)."""
IN_FLIGHT_READS = 128
"""Maximum concurrent reads of a process."""
PATIENCE, SLOWEST = 20.0, 256 << 10
"""A read may take PATIENCE seconds, and one more for each SLOWEST bytes."""

Range = tuple[Url, int, int, str]
"""A range of an object: URL, first byte, bytes, and its tag or ""."""

_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "600s"}
_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CODES = {
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "AlreadyExistsError": errno.EEXIST,
    "NotSupportedError": errno.EOPNOTSUPP,
    "InvalidPathError": errno.EINVAL,
    "PermissionError": errno.EACCES,
    "FileNotFoundError": errno.ENOENT,
    "FileExistsError": errno.EEXIST,
}
"""Errors of obstore and Python by name; others are EIO."""


class ObjectStore:
    """A bucket of s3, gs or az, or a web server. Thread-safe.

    Methods raise FileNotFoundError, PermissionError, `Changed`, FileExistsError, or another OSError, with the URL as
    file name. Creating one raises OSError for invalid settings in the environment.
    """

    def __init__(self, url: Url) -> None:
        from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

        self._scheme = url.scheme
        self._versions: dict[str, tuple[str, str | None]] = {}
        endpoint = next((value for name in _ENDPOINTS.get(url.scheme, ()) if (value := os.environ.get(name))), "")
        is_plain = url.scheme == "http" or endpoint.lower().startswith("http://")  # chosen by the user
        options: Any = {"client_options": _CLIENT | {"allow_http": is_plain}, "retry_config": _RETRIES}
        with _os_errors(url):
            if url.scheme in WEB:
                self._store: Any = HTTPStore(f"{url.scheme}://{url.host}", **options)
            elif url.scheme == "s3":
                self._store = S3Store(url.host, **({"endpoint": endpoint} if endpoint else {}), **options)
            else:
                self._store = (GCSStore if url.scheme == "gs" else AzureStore)(url.host, **options)

    def list(self, folder: Url, *, deep: bool = True) -> list[ObjectMeta]:
        """Return the objects under a folder, or only directly in it if not `deep`, sorted by name."""
        import obstore

        with _os_errors(folder):
            if deep:
                objects = [meta for page in obstore.list(self._store, folder.path or None) for meta in page]
            else:
                objects = [*obstore.list_with_delimiter(self._store, folder.path or None)["objects"]]
        metas = [self._meta(Url(folder.scheme, folder.host, meta["path"]), meta) for meta in objects]
        return sorted(metas, key=lambda meta: meta.url)

    def look(self, url: Url) -> ObjectMeta:
        """Return size, tag and time of an object."""
        import obstore

        with _os_errors(url):
            meta = obstore.head(self._store, url.path)
        result = self._meta(url, meta)
        if self._scheme not in WEB:
            self._versions[url.path] = result.tag, meta.get("version")
        return result

    async def read(self, url: Url, start: int, size: int, tag: str = "") -> memoryview:
        """Return up to `size` bytes from `start`, as many as the object has. Raises `Changed` for another tag."""
        import obstore

        options: Any = {"range": (start, start + size)}
        if tag.startswith('"'):  # weak tags never match
            options["if_match"] = tag
        with _os_errors(url):
            answer = await obstore.get_async(self._store, url.path, options=options)
            meta, (first, last) = answer.meta, answer.range
            if tag and self._meta(url, meta).tag != tag:
                raise Changed(url)
            content = memoryview(await answer.bytes_async())
        # Nothing else detects a header that contradicts the content.
        if first != start or last - first != len(content) or len(content) > size:
            raise OSError(errno.EIO, f"the server sent {len(content)} bytes as {first} to {last}", str(url))
        return content

    def put(self, url: Url, content: bytes, *, new: bool = False, instead_of: str = "") -> str:
        """Write an object in one request and return its tag. With `new`, raises FileExistsError if it exists. With
        `instead_of`, raises `Changed` if it has another tag."""
        import obstore

        mode: Any = "create" if new else "overwrite"
        if instead_of:
            tag, version = self._versions.get(url.path, (instead_of, None))
            mode = {"e_tag": instead_of, **({"version": version} if version and tag == instead_of else {})}
        try:
            with _os_errors(url):
                result = obstore.put(self._store, url.path, content, mode=mode, use_multipart=False)
        except Changed as error:
            if new:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(url)) from error
            raise
        self._versions[url.path] = result["e_tag"] or "", result["version"]
        return result["e_tag"] or ""

    def upload(self, url: Url, parts: Iterable[bytes | memoryview], size: int) -> int:
        """Write an object of about `size` bytes in parts and return its size. It appears when it is complete."""
        import obstore

        sent = 0
        failed: list[BaseException] = []

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal sent
            try:
                for part in parts:
                    sent += len(part)
                    yield part
            except BaseException as error:
                failed.append(error)
                raise

        options: Any = {"use_multipart": True, "chunk_size": max(PART, -(-size // MOST_PARTS)), "max_concurrency": 4}
        try:
            with _os_errors(url):
                obstore.put(self._store, url.path, counted(), **options)
        except BaseException:
            if failed:
                raise failed[0] from None
            raise
        return sent

    def remove(self, urls: Iterable[Url]) -> None:
        """Remove objects; missing ones are ignored."""
        import obstore

        urls = list(urls)
        try:
            with _os_errors(urls[0]):
                obstore.delete(self._store, [url.path for url in urls])
        except FileNotFoundError:
            for url in urls if len(urls) > 1 else []:
                self.remove([url])

    def _meta(self, url: Url, meta: Any) -> ObjectMeta:
        modified, tag = meta["last_modified"].timestamp(), meta["e_tag"]
        if tag and self._scheme not in WEB and not tag.startswith(('"', "W/")):
            tag = f'"{tag}"'  # Azure quotes it in answers but not in lists
        return ObjectMeta(url, meta["size"], tag or f"{meta['size']} {modified:.6f}", modified)


@contextmanager
def _os_errors(url: Url) -> Iterator[None]:
    """Convert errors of obstore to OSError with the URL as file name."""
    from obstore import exceptions

    try:
        yield
    except Changed:
        raise
    except (exceptions.PreconditionError, exceptions.NotModifiedError) as error:
        raise Changed(url) from error
    except (exceptions.BaseError, OSError, ValueError) as error:
        code = next((_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES), errno.EIO)
        # Some messages repeat themselves.
        raise OSError(code, " ".join(str(error).split())[:300] or type(error).__name__, str(url)) from error


_STORES: dict[tuple[str, str], ObjectStore] = {}
_GUARD = threading.Lock()
_FORKED = False


def store_of(url: Url) -> ObjectStore:
    """Return the client for the bucket or server of a URL. The first call imports obstore.

    Raises:
        DataError: the scheme is unsupported, obstore is not installed, or this process was forked after storage was
            used: it would wait forever for the client's missing threads.
    """
    require_scheme(url)
    with _GUARD:
        if _FORKED:
            raise DataError(
                f"{url}: this process was forked from one that had already used object storage. Start processes by "
                "spawn or forkserver"
            )
        key = url.scheme, url.host
        if key not in _STORES:
            try:
                _STORES[key] = ObjectStore(url)
            except ImportError as error:
                raise DataError(f"{url}: reading it requires the extra `remote` ({error}): run `{EXTRA}`") from error
        return _STORES[key]


class IoThread:
    """An event loop in a thread, which starts with the first read. `patience`: seconds, see PATIENCE."""

    def __init__(self, in_flight_reads: int = IN_FLIGHT_READS, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._slots = asyncio.Semaphore(in_flight_reads)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = threading.Lock()

    def read_all(self, ranges: Sequence[Range]) -> list[Future[memoryview]]:
        """Start to read ranges, up to the ends of their objects.

        The futures raise `Changed` for another tag, or another OSError (also for a timeout), with the URL as file name.
        All are submitted together: waking the thread yields the interpreter, which may cost milliseconds.
        """
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="storage", daemon=True).start()
        futures: list[Future[memoryview]] = [Future() for _ in ranges]
        self._loop.call_soon_threadsafe(self._start, ranges, futures)
        return futures

    def _start(self, ranges: Sequence[Range], futures: Sequence[Future[memoryview]]) -> None:
        for wanted, future in zip(ranges, futures, strict=True):
            task = asyncio.ensure_future(self._read(future, *wanted))
            self._tasks.add(task)  # the loop keeps only weak references
            task.add_done_callback(self._tasks.discard)

    async def _read(self, future: Future[memoryview], url: Url, start: int, size: int, tag: str) -> None:
        seconds = self._patience + size / SLOWEST
        try:
            async with self._slots:
                async with asyncio.timeout(seconds):
                    content = await store_of(url).read(url, start, size, tag) if size > 0 else memoryview(b"")
            future.set_result(content)
        except TimeoutError:
            message = f"no answer of {size} bytes in {seconds:.3g} seconds"
            future.set_exception(OSError(errno.ETIMEDOUT, message, str(url)))
        except BaseException as error:
            future.set_exception(error)


IO = IoThread()


def _forked() -> None:
    global IO, _GUARD, _FORKED
    _FORKED, _GUARD = bool(_STORES), threading.Lock()
    IO = IoThread()  # the thread does not exist here


os.register_at_fork(after_in_child=_forked)


def start_reads(ranges: Sequence[Range]) -> list[Future[memoryview]]:
    """Start to read ranges. See `IoThread.read_all`."""
    return IO.read_all(ranges)


def start_read(url: Url, start: int, size: int, tag: str = "") -> Future[memoryview]:
    """Start to read `size` bytes of an object from `start`. See `IoThread.read_all`."""
    return IO.read_all([(url, start, size, tag)])[0]


def read_range(url: Url, start: int, size: int, tag: str = "") -> memoryview:
    """Read `size` bytes of an object from `start`."""
    return start_read(url, start, size, tag).result()
