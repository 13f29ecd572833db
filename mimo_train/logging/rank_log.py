"""Log file of a rank: timestamped lines that it prints, and what `library_log` keeps off the console."""

import heapq
import os
import re
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

FOLDER = "logs"
_NAME = re.compile(r"rank_(\d+)\.log")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that move a terminal's cursor or set colours."""


def log_of(run_dir: Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return run_dir / FOLDER / f"rank_{rank}.log"


class RankLog:
    """Append lines to a file that is created with the first line.

    Attributes:
        has_console: True if the file also has this process's console output, see `copy_console`.
    """

    def __init__(self, path: Path):
        self.has_console = False
        self._path, self._stderr = path, sys.stderr
        self._file: TextIO | None = None
        self._lost = False

    def write(self, text: str) -> None:
        """Write every line of a text; print it on the console if that fails."""
        if not self._append(text.splitlines()):
            print(text, file=self._stderr, flush=True)

    def copy_console(self) -> None:
        """Copy this process's later console output into the file, except what libraries print past Python."""
        self.has_console = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None:  # None in a process started without it
                setattr(sys, name, _Copied(stream, self))

    def _append(self, lines: list[str]) -> bool:
        if self._lost:
            return False
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
                lines = [f"-- process {os.getpid()}", *lines]
            now = time.time()
            stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
            self._file.write("".join(f"{stamp} {line}\n" for line in lines))
            self._file.flush()
        except (OSError, ValueError):  # the disk is full or gone, or the interpreter ends
            self._lost = True
        return not self._lost


class _Copied:
    """A console stream that copies complete lines to a log."""

    def __init__(self, stream: TextIO, log: RankLog):
        self._stream, self._log, self._begun = stream, log, ""

    def write(self, text: str) -> int:
        *lines, begun = (self._begun + text).split("\n")
        self._begun = begun[begun.rfind("\r") + 1 :]  # drop what a progress bar has overwritten
        if lines:
            self._log._append([_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines])
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Line(NamedTuple):
    """A line of a rank's log; lines sort by time."""

    stamp: str
    """UTC time by the rank's machine; a line without one has the previous line's."""
    rank: int
    text: str


class Logs:
    """The logs of a run's ranks, which may grow while they are read.

    Args:
        ranks: ranks to read; empty for all.
    """

    def __init__(self, run_dir: Path, ranks: Collection[int] = ()):
        self._folder, self._ranks = run_dir / FOLDER, ranks
        self._places: dict[int, tuple[int, str]] = {}
        """Bytes of each rank that were read, and the time of its last line."""

    def __iter__(self) -> Iterator[Line]:
        """Yield all lines written since the last iteration, by time."""
        ranks = [int(name[1]) for path in self._folder.glob("rank_*.log") if (name := _NAME.fullmatch(path.name))]
        chosen = [rank for rank in sorted(ranks) if not self._ranks or rank in self._ranks]
        return heapq.merge(*map(self._new_lines, chosen))

    def _new_lines(self, rank: int) -> Iterator[Line]:
        """Yield complete lines of a rank's log from where the last reading ended."""
        place, stamp = self._places.get(rank, (0, ""))
        try:
            with (self._folder / f"rank_{rank}.log").open("rb") as file:
                file.seek(place)
                *lines, _ = file.read().split(b"\n")
        except OSError:  # it was removed
            return
        for line in lines:
            place, text = place + len(line) + 1, line.decode(errors="replace")
            if begin := _STAMP.match(text):
                stamp, text = begin[0].rstrip(), text[begin.end() :]
            self._places[rank] = place, stamp
            yield Line(stamp, rank, text)


def show(text: str, end: str = "\n") -> None:
    """Print a line; if that fails, silence this process's stdout."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        to_nowhere(sys.stdout)


def to_nowhere(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to /dev/null, with what is left in its buffer."""
    with suppress(OSError, ValueError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
