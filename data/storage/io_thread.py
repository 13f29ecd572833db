"""One thread that does all remote reads of a process, side by side: threads of their own would each wait for the
interpreter beside a busy one.

What is in flight is bounded in bytes and in number; a read has a time-out that grows with its size.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from data.storage.stores import store_of
from data.storage.url import Url

IN_FLIGHT_BYTES, IN_FLIGHT_READS = 256 << 20, 128
PATIENCE, SLOWEST = 20.0, 256 << 10
"""A read may take PATIENCE seconds and one for each SLOWEST bytes."""


Wanted = tuple[Url, int, int, str]
"""Of an object: first byte, bytes, its tag or an empty one."""


class IoThread:
    """An event loop in a thread, which begins with the first read.

    Args:
        in_flight_bytes, in_flight_reads: bounds; a read larger than the bound goes alone.
        patience: seconds, see PATIENCE.
    """

    def __init__(
        self,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        in_flight_reads: int = IN_FLIGHT_READS,
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        self._most_bytes, self._most_reads = in_flight_bytes, in_flight_reads
        self._bytes = self._reads = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._tasks: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = threading.Lock()

    def read(self, url: Url, start: int, size: int, tag: str = "") -> Future[memoryview]:
        """Bytes of an object from `start` on: `size`, or those up to its end.

        The future raises `Changed` where the object has another tag than the given one, TimeoutError, or another
        OSError; each with the URL as file name.
        """
        (future,) = self.read_all([(url, start, size, tag)])
        return future

    def read_all(self, ranges: Sequence[Wanted]) -> list[Future[memoryview]]:
        """`read` of each. They are handed over together: to wake the thread is to give up the interpreter, which beside
        a busy thread comes back after milliseconds."""
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="storage", daemon=True).start()
        futures: list[Future[memoryview]] = [Future() for _ in ranges]
        self._loop.call_soon_threadsafe(self._begin, ranges, futures)
        return futures

    def _begin(self, ranges: Sequence[Wanted], futures: Sequence[Future[memoryview]]) -> None:
        for wanted, future in zip(ranges, futures, strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            task = asyncio.ensure_future(self._settle(future, *wanted))
            self._tasks.add(task)  # a loop does not keep them
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
        await self._enter(size)
        try:
            seconds = self._patience + size / SLOWEST
            try:
                async with asyncio.timeout(seconds):
                    return await store_of(url).read(url, start, size, tag)
            except TimeoutError:
                said = f"no answer of {size} bytes in {seconds:.3g} seconds"
                raise OSError(errno.ETIMEDOUT, said, str(url)) from None
        finally:
            self._leave(size)

    async def _enter(self, size: int) -> None:
        if not self._waiting and self._has_room(size):
            self._take(size)
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((size, place))
        await place

    def _leave(self, size: int) -> None:
        self._bytes -= size
        self._reads -= 1
        # In order: a large one would wait for ever behind small ones.
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            waiting, place = self._waiting.popleft()
            if not place.done():
                self._take(waiting)
                place.set_result(None)

    def _has_room(self, size: int) -> bool:
        return not self._reads or (self._reads < self._most_reads and self._bytes + size <= self._most_bytes)

    def _take(self, size: int) -> None:
        self._bytes += size
        self._reads += 1


IO = IoThread()
"""That of this process."""


def _forked() -> None:
    global IO
    IO = IoThread()  # the thread is not here


os.register_at_fork(after_in_child=_forked)


def start_read(url: Url, start: int, size: int, tag: str = "") -> Future[memoryview]:
    """`IoThread.read` of this process."""
    return IO.read(url, start, size, tag)


def start_reads(ranges: Sequence[Wanted]) -> list[Future[memoryview]]:
    """`IoThread.read_all` of this process."""
    return IO.read_all(ranges)


def read_range(url: Url, start: int, size: int, tag: str = "") -> memoryview:
    """`start_read`, waited for."""
    return start_read(url, start, size, tag).result()
