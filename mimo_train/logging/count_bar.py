"""The progress of long work: a bar on a terminal, a line now and then anywhere else."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mimo_train.logging.console import duration

_SECONDS_BETWEEN_LINES = 10.0


class CountBar:
    """Shows how many of `total` are done, and the time that is left; nothing away from a terminal if it takes seconds.

    Attributes:
        done: how many are done.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str = "",
        *,
        stream: TextIO | None = None,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            what: is done, for example "counting the tokens of texts".
            total: None: not known.
            unit: is counted, for example "samples".
            stream: default: standard error.
            write: prints a line; with it there is no bar.
        """
        self._what, self._total, self._unit, self.done = what, total, f" {unit}" if unit else "", 0
        self._stream = sys.stderr if stream is None else stream
        self._write, self._clock = write or self._print, clock
        self._start = self._last = clock()
        self._bar: Progress | None = None
        if write is None and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            console = rich.console.Console(file=self._stream, force_terminal=True)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()

    def add(self, number: int) -> None:
        """Count `number` more as done."""
        self.done += number
        now = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            of = left = ""
            if self._total is not None:
                of = f" of {self._total:,}"
                left = f", {duration((now - self._start) / self.done * (self._total - self.done))} left"
            self._write(f"{self._what}: {self.done:,}{of}{self._unit}{left}")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
