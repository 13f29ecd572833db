"""The progress of long work: a bar on a terminal, a line now and then anywhere else."""

import os
import sys
import time
from typing import TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class CountBar:
    """Shows how many of `total` are done; away from a terminal nothing of what takes seconds."""

    def __init__(self, what: str, total: int | None, stream: TextIO | None = None):
        """
        Args:
            what: is counted, for example "texts".
            total: None: not known.
            stream: default: standard error.
        """
        self._what, self._total, self._done = what, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            console = rich.console.Console(file=self._stream, force_terminal=True)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()

    def add(self, number: int) -> None:
        """That many more are done."""
        self._done += number
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            total = "" if self._total is None else f" of {self._total:,}"
            print(f"{self._what}: {self._done:,}{total}", file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.stop()
