"""The log of a rank: lines with their time, in a file of its own.

A rank's file has what it prints, and what `library_log` keeps from the console. `merged` shows those of all ranks.
"""

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
"""In the folder of a run."""
_NAME = re.compile(r"rank_(\d+)\.log")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What moves a terminal's cursor, or colours."""
_BLOCK = 1 << 16
"""Bytes of a file that are read at once: those of thousands of ranks are not open together."""


def log_of(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return run_dir / FOLDER / f"rank_{rank}.log"


class RankLog:
    """Appends lines to a file, which is made with the first of them.

    Attributes:
        has_console: whether what this process prints is in the file, too, see `copy_console`.
    """

    def __init__(self, path: Path):
        self.has_console = False
        self._path, self._stderr = path, sys.stderr
        self._file: TextIO | None = None
        self._lost = False

    def write(self, text: str) -> None:
        """Write every line of a text; on the console if that fails."""
        if not self._append(text.splitlines()):
            print(text, file=self._stderr, flush=True)

    def copy_console(self) -> None:
        """Let what this process prints from now on be in the file, too. Not what libraries print past Python."""
        self.has_console = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None:  # as where a process was started without one
                setattr(sys, name, _Copied(stream, self))

    def _append(self, lines: list[str]) -> bool:
        """Return True if they could be written."""
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
        except (OSError, ValueError):  # the disk is full, was taken away, or the interpreter ends
            self._lost = True
        return not self._lost


class _Copied:
    """A stream of the console whose whole lines are in a log, too."""

    def __init__(self, stream: TextIO, log: RankLog):
        self._stream, self._log, self._begun = stream, log, ""

    def write(self, text: str) -> int:
        *lines, begun = (self._begun + text).split("\n")
        self._begun = begun[begun.rfind("\r") + 1 :]  # what a progress bar has written over
        if lines:
            self._log._append([_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines])
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Line(NamedTuple):
    """A line of a rank's log; lines are in the order of their times."""

    stamp: str
    """UTC, as the rank's machine had it; of a line without one, that of the line before."""
    rank: int
    text: str


class Logs:
    """The logs of a run's ranks, which may grow while they are read.

    Args:
        ranks: those that are read; empty: all.
    """

    def __init__(self, run_dir: Path, ranks: Collection[int] = ()):
        self._folder, self._ranks = run_dir / FOLDER, ranks
        self._files: dict[int, _File] = {}

    def __iter__(self) -> Iterator[Line]:
        """All lines that have been written since the last time, in their order."""
        return heapq.merge(*(file.lines() for file in self._found()))

    def _found(self) -> list["_File"]:
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = os.listdir(self._folder)
        for found in filter(None, map(_NAME.fullmatch, names)):
            rank = int(found[1])
            if not self._ranks or rank in self._ranks:
                self._files.setdefault(rank, _File(self._folder / found[0], rank))
        return [self._files[rank] for rank in sorted(self._files)]


class _File:
    """Reads whole lines of a rank's log, from where the last reading has ended."""

    def __init__(self, path: Path, rank: int):
        self._path, self._rank, self._at, self._stamp = path, rank, 0, ""

    def lines(self) -> Iterator[Line]:
        begun = b""
        while True:
            try:
                with self._path.open("rb") as file:
                    file.seek(self._at + len(begun))
                    block = file.read(_BLOCK)
            except OSError:  # it was removed
                return
            if not block:
                return
            *lines, begun = (begun + block).split(b"\n")
            self._at += sum(len(line) + 1 for line in lines)
            for line in lines:
                text = line.decode(errors="replace")
                if stamp := _STAMP.match(text):
                    self._stamp, text = stamp[0].rstrip(), text[stamp.end() :]
                yield Line(self._stamp, self._rank, text)


def show(text: str, end: str = "\n") -> None:
    """Print a line; where that cannot be, nothing of this process is printed any more."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        to_nowhere(sys.stdout)


def to_nowhere(stream: TextIO) -> None:
    """Let what goes to a stream that cannot be written, and what is left in its buffer, be lost without an error."""
    with suppress(OSError, ValueError):  # one without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
