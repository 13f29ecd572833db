"""Access to object storage and web servers: one client per bucket or server, one I/O thread per process.

Several threads would each wait for the interpreter next to a busy one; an event loop in one thread does not (reference
measurements: 16 threads 180-290 reads/s, one event loop 1,180-1,575).
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from data.errors import DataError
from data.storage.url import OBJECTS, WEB, Url

if TYPE_CHECKING:
    from data.storage.objects import ObjectStore

EXTRA = "pip install 'mimo-train[remote]'"

IN_FLIGHT_READS = 128
"""Maximum concurrent reads of a process."""
PATIENCE, SLOWEST = 20.0, 256 << 10
"""A read may take PATIENCE seconds, and one more for each SLOWEST bytes."""

Range = tuple[Url, int, int, str]
"""A range of an object: URL, first byte, bytes, and its tag or ""."""

_REMEDIES = {
    "hf": "download it first, for example `hf download REPO --repo-type dataset --local-dir DIR`, and name DIR",
    "sftp": "mount it (sshfs) or copy it (rsync) first, and name the folder",
}
_STORES: dict[tuple[str, str], ObjectStore] = {}
_GUARD = threading.Lock()
_FORKED = False


def require_scheme(url: Url) -> None:
    """Raise DataError for a URL without a client."""
    if url.scheme not in OBJECTS + WEB:
        known = ", ".join(f"{scheme}://" for scheme in OBJECTS + WEB)
        remedy = _REMEDIES.get(url.scheme, "copy it to a local disk or to one of these first")
        raise DataError(f"{url}: {url.scheme}:// is not supported ({known} are): {remedy}")


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
                from data.storage.objects import ObjectStore
            except ImportError as error:
                package = f" ({error.name} is not installed)" if error.name else ""
                raise DataError(f"{url}: reading it requires the extra `remote`{package}: run `{EXTRA}`") from error
            _STORES[key] = ObjectStore(url)
        return _STORES[key]


class IoThread:
    """An event loop in a thread, which starts with the first read. `patience`: seconds, see PATIENCE."""

    def __init__(self, in_flight_reads: int = IN_FLIGHT_READS, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._places = asyncio.Semaphore(in_flight_reads)
        self._tasks: set[asyncio.Future[None]] = set()
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
            if future.set_running_or_notify_cancel():
                task = asyncio.ensure_future(self._settle(future, *wanted))
                self._tasks.add(task)  # the loop keeps only weak references
                task.add_done_callback(self._tasks.discard)

    async def _settle(self, future: Future[memoryview], url: Url, start: int, size: int, tag: str) -> None:
        try:
            content = await self._read(url, start, size, tag)
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(content)

    async def _read(self, url: Url, start: int, size: int, tag: str) -> memoryview:
        if size <= 0:
            return memoryview(b"")
        async with self._places:
            seconds = self._patience + size / SLOWEST
            try:
                async with asyncio.timeout(seconds):
                    return await store_of(url).read(url, start, size, tag)
            except TimeoutError:
                message = f"no answer of {size} bytes in {seconds:.3g} seconds"
                raise OSError(errno.ETIMEDOUT, message, str(url)) from None


IO = IoThread()


def _forked() -> None:
    global IO, _GUARD, _FORKED
    _FORKED, _GUARD = bool(_STORES), threading.Lock()
    IO = IoThread()  # the thread does not exist here


os.register_at_fork(after_in_child=_forked)


def start_read(url: Url, start: int, size: int, tag: str = "") -> Future[memoryview]:
    """Start to read `size` bytes of an object from `start`. See `IoThread.read_all`."""
    return IO.read_all([(url, start, size, tag)])[0]


def start_reads(ranges: Sequence[Range]) -> list[Future[memoryview]]:
    """Start to read ranges. See `IoThread.read_all`."""
    return IO.read_all(ranges)


def read_range(url: Url, start: int, size: int, tag: str = "") -> memoryview:
    """Read `size` bytes of an object from `start`."""
    return start_read(url, start, size, tag).result()
