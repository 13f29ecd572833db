"""Threads that read ahead, and for which no process waits at its end: one that hangs would keep it from ending.

Those of `concurrent.futures` are joined by the interpreter, however long they take, also in a program of a user's.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

_NAME = "data_"
_PATIENCE = 5.0  # seconds that the end of a read is waited for which nobody needs
_Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def still_reading() -> bool:
    """Whether threads are left whose reads nobody has waited for."""
    return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


class ReadingThreads:
    """Do what is submitted, in its order; each begins with its first task."""

    def __init__(self, number: int) -> None:
        assert number > 0
        self._number = number
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # Also where nobody closes it, at the latest at the interpreter's end: whoever reads while that takes itself
        # apart could abort it.
        weakref.finalize(self, _end, self._tasks, self._threads)

    def submit[Result](self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """What `work(*arguments)` gives, or raises; not after `close`."""
        future: Future[Result] = Future()
        self._tasks.put((future, partial(work, *arguments)))
        if len(self._threads) < self._number:
            name = f"{_NAME}{len(self._threads)}"
            self._threads.append(threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True))
            self._threads[-1].start()
        return future

    def close(self, *, waits: bool = True) -> None:
        """Cancel what no thread has begun, and wait for the threads to end: for a while, or not at all. May be called
        twice."""
        _end(self._tasks, self._threads, _PATIENCE if waits else 0)


def each(work: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
    """What `work` gives for each number."""
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
        if thread is not threading.current_thread():  # which may be the last to know what is collected
            thread.join(max(0, deadline - time.monotonic()))


def _run(tasks: _Tasks) -> None:
    """Knows the queue alone, so that threads that nobody has closed keep nothing else alive."""
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del task, future, work


LOOK_SECONDS = 0.5
"""How long a wait lasts before it first asks whether it is given up, and about how long between two questions."""

GivesUp = Callable[[], bool]
"""Whether nobody needs any more what is waited for; once true, it stays so."""


class WaitGivenUp(Exception):
    """Samples were not waited for, because nobody needs them any more. Nothing is wrong with them."""


def never() -> bool:
    """A `GivesUp` that waits for as long as it takes."""
    return False


class Wait:
    """One wait, for one or several things; it begins when it is made."""

    def __init__(self, gives_up: GivesUp) -> None:
        self._gives_up, self._began = gives_up, time.monotonic()

    def look(self) -> None:
        """Raises WaitGivenUp if the wait has lasted for LOOK_SECONDS, and is given up."""
        if time.monotonic() > self._began + LOOK_SECONDS and self._gives_up():
            raise WaitGivenUp

    def result_of[Result](self, future: Future[Result]) -> Result:
        """What `future.result()` gives, or raises. Raises WaitGivenUp where there is none yet."""
        while not future.done():
            self.look()
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:  # of this wait; the work's own comes again below
                continue
        return future.result()
