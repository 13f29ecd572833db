"""Which files threads of this process read at the moment, for whoever asks why a run waits. Imports no torch."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Reads:
    """What is being read.

    Attributes:
        count: reads that have begun or ended: it changes while data are read.
    """

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[int, tuple[float, str]] = {}

    @contextmanager
    def of(self, path: object) -> Iterator[None]:
        """A block that reads from `path`."""
        thread = threading.get_ident()
        before = self._open.get(thread)
        self._open[thread] = time.monotonic(), str(path)
        self.count += 1
        try:
            yield
        finally:
            self.count += 1
            if before is None:
                self._open.pop(thread, None)
            else:
                self._open[thread] = before

    def longest(self) -> str:
        """The path that a thread has been reading from for the longest time; empty if there is none."""
        reads = [*self._open.values()]
        return min(reads)[1] if reads else ""


READS = Reads()
"""Of this process."""
