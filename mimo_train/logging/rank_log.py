"""Log file of a rank: timestamped lines that it prints, and warnings of libraries, which stay off the console.

Importing Megatron-Core 0.19.2 prints a dozen irrelevant warnings on every rank. Warnings of mimo-train and of user
modules, and errors of libraries, stay on the console.
"""

import ctypes
import heapq
import logging
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

FOLDER = "logs"
_NAME = re.compile(r"rank_(\d+)\.log")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that move a terminal's cursor or set colours."""
HOME = Path(__file__).resolve().parents[2]
OWN = tuple(f"{HOME / name}{os.sep}" for name in ("encoders", "data", "mimo_train"))
LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for key in ("purelib", "platlib", "stdlib", "platstdlib")
    for folder in {sysconfig.get_path(key), os.path.realpath(sysconfig.get_path(key))}
)
CPU_BACKEND = str(HOME / "mimo_train" / "cpu" / "backend.py")
"""On the CPU every torch call passes through this file, so warnings about the caller name it."""
CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"


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


def is_library(file: str) -> bool:
    """True if a source file belongs to a library, not to mimo-train or the user."""
    file = os.path.abspath(file)
    return file == CPU_BACKEND or (file.startswith(LIBRARIES) and not file.startswith(OWN))


def divert(path: Path | None) -> RankLog:
    """Append warnings and log records of libraries, below errors, to a file from now on.

    They stay on the console if the file cannot be written; so do torch's records if TORCH_LOGS is set. Call it before
    importing the libraries, and `adopt_torch` after importing torch.

    Args:
        path: created with the first record; None drops the records.

    Returns:
        Log of the file.
    """
    log, console = RankLog(path or Path(os.devnull)), warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None or not is_library(filename):
            console(message, category, filename, lineno, file, line)
        else:
            log.write(warnings.formatwarning(message, category, filename, lineno, line).rstrip())

    warnings.showwarning = show
    logging.getLogger().addHandler(_Handler(log))
    return log


def divert_command(command: str, run_dir: Path | None) -> None:
    """Call `divert` with `logs/COMMAND.log` in the run's folder.

    Args:
        run_dir: None if the folder is not on this machine; records are dropped.
    """
    divert(None if run_dir is None else run_dir / "logs" / f"{command}.log")


def adopt_torch() -> None:
    """Route torch's loggers to the handler of `divert`: torch gives each a handler that prints."""
    if "TORCH_LOGS" in os.environ:
        return
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
            logger.removeHandler(handler)
        logger.propagate = True


def errors_only(*, inherited: bool = True) -> None:
    """Print only errors from torch's C++ from now on, even after importing torch. No effect if the user has set a
    level.

    Args:
        inherited: False to keep warnings in child processes.
    """
    if CPP_LEVEL in os.environ:
        return
    os.environ[CPP_LEVEL] = "ERROR"
    if torch := sys.modules.get("torch"):
        # Torch reads the variable at import. A torch without this function keeps its warnings.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(Path(torch.__path__[0], "lib", "libc10.so")))._ZN3c1011initLoggingEv()
    if not inherited:
        del os.environ[CPP_LEVEL]


class _Handler(logging.Handler):
    """Write library records to the log; print their errors and all other records, like Python's last-resort handler."""

    def __init__(self, log: RankLog):
        super().__init__()
        self._log = log
        self._format = logging.Formatter("%(levelname)s %(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        last = logging.lastResort
        try:
            if is_library(record.pathname):
                is_error = record.levelno >= logging.ERROR
                if not (is_error and self._log.has_console):
                    self._log.write(self._format.format(record))
                if not is_error:
                    return
            if last is not None and record.levelno >= last.level:
                last.handle(record)
        except Exception:  # a logger must never end its caller
            self.handleError(record)
