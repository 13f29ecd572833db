"""Threads and processes that work for this process and keep it from nothing.

The interpreter joins the threads of `concurrent.futures` however long they take, and its processes wait forever if the
one that started them is killed.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Any

from data.errors import DataError

_NAME = "data_"
_PATIENCE = 5.0  # seconds to wait for a read that nobody needs
_Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def still_reading() -> bool:
    """True if there are unfinished reads that nobody has waited for."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


class ReadingThreads:
    """Run submitted tasks in order. A thread starts with its first task."""

    def __init__(self, number: int) -> None:
        assert number > 0
        self._number = number
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # Also without `close`, at the interpreter's end at the latest: reads during its shutdown could abort it.
        weakref.finalize(self, _end, self._tasks, self._threads)

    def submit[Result](self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Return a future of `work(*arguments)`. Not allowed after `close`."""
        future: Future[Result] = Future()
        self._tasks.put((future, partial(work, *arguments)))
        if len(self._threads) < self._number:
            name = f"{_NAME}{len(self._threads)}"
            self._threads.append(threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True))
            self._threads[-1].start()
        return future

    def close(self, *, waits: bool = True) -> None:
        """Cancel pending tasks, and wait for the threads for a while (or not at all). May be called twice."""
        _end(self._tasks, self._threads, _PATIENCE if waits else 0)


def each(work: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
    return [work(number) for number in numbers]


def _end(tasks: _Tasks, threads: list[threading.Thread], patience: float | None = None) -> None:
    while not tasks.empty():
        try:
            task = tasks.get_nowait()
        except queue.Empty:  # a thread was faster
            break
        if task is not None:
            task[0].cancel()
    for _ in threads:
        tasks.put(None)
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
    for thread in threads:
        if thread is not threading.current_thread():  # a thread may run this when the last reference goes
            thread.join(max(0, deadline - time.monotonic()))


def _run(tasks: _Tasks) -> None:
    """Run tasks. It refers to the queue alone, so unclosed threads keep nothing else alive."""
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del task, future, work


LOOK_SECONDS = 0.5
"""Seconds before a wait first polls `GivesUp`, and between polls."""

GivesUp = Callable[[], bool]
"""Returns True once nobody needs the samples; it then stays True."""


class WaitGivenUp(Exception):
    """The wait for samples was given up because nobody needs them. They are not bad."""


def never() -> bool:
    """Return False: a `GivesUp` that waits as long as it takes."""
    return False


class Wait:
    """One wait, for one or more results. It starts when it is created."""

    def __init__(self, gives_up: GivesUp) -> None:
        self._gives_up, self._began = gives_up, time.monotonic()

    def look(self) -> None:
        """Raise WaitGivenUp if the wait has lasted LOOK_SECONDS and is given up."""
        if time.monotonic() > self._began + LOOK_SECONDS and self._gives_up():
            raise WaitGivenUp

    def result_of[Result](self, future: Future[Result]) -> Result:
        """Return `future.result()`. Raises its error, or WaitGivenUp."""
        while not future.done():
            self.look()
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:  # from this wait; the task's own TimeoutError is raised below
                continue
        return future.result()


@contextmanager
def worker_processes(
    number: int, begin: Callable[..., Any] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of `number` processes. When the block ends or raises, pending jobs are cancelled. Each process calls
    `begin(*given)` first. All jobs must be at module level. Raises DataError if a process was killed."""
    # No fork: this process may have threads that hold locks.
    with ProcessPoolExecutor(number, get_context("spawn"), _begin, (begin, arguments)) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise DataError(
                f"one of {number} processes that worked for this one was killed, as the system does where memory runs "
                "out: free some, or let `mimo-train shards` do that work before, with fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(begin: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
    # The parent handles Ctrl-C and a closed terminal, and ends this process.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end_with_parent", daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
