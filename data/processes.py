"""Worker processes that end with this one.

Those of `concurrent.futures` wait forever if the process that started them is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any

from data.errors import DataError


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
