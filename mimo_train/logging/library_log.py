"""Send warnings of libraries to the log of a rank, so that the console shows the run itself.

Importing Megatron-Core 0.19.2 warns a dozen times on every rank, on most machines about things that do not concern the
run. Warnings of mimo-train and of the user's own modules stay on the console, and so do errors of libraries.
"""

import ctypes
import logging
import os
import sys
import sysconfig
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mimo_train.logging.rank_log import RankLog

HOME = Path(__file__).resolve().parents[2]
OWN = tuple(f"{HOME / name}{os.sep}" for name in ("encoders", "data", "mimo_train"))
LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for key in ("purelib", "platlib", "stdlib", "platstdlib")
    for folder in {sysconfig.get_path(key), os.path.realpath(sysconfig.get_path(key))}
)
CPU_BACKEND = str(HOME / "mimo_train" / "cpu" / "backend.py")
"""On the CPU every call of torch passes through it, so that warnings about the caller name this file."""
CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"


def is_library(file: str) -> bool:
    """True if a source file belongs to a library, neither to mimo-train nor to modules of the user."""
    file = os.path.abspath(file)
    return file == CPU_BACKEND or (file.startswith(LIBRARIES) and not file.startswith(OWN))


def divert(path: Path | None) -> RankLog:
    """Append warnings and log records of libraries, below errors, to a file from now on. They stay on the console if
    the file cannot be written, and records of torch where TORCH_LOGS asks for them.

    Call it before the libraries are imported, and `adopt_torch` after torch was.

    Args:
        path: made with the first record; None: drop the records.

    Returns:
        The file's log.
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
    """Call `divert` for a command that reads a run, with `logs/COMMAND.log` of the run's folder.

    Args:
        run_dir: None where there is no such folder on this machine; the records are dropped.
    """
    divert(None if run_dir is None else run_dir / "logs" / f"{command}.log")


def adopt_torch() -> None:
    """Leave the records of torch's loggers to the handler of `divert`: torch gives each its own, which prints them."""
    if "TORCH_LOGS" in os.environ:
        return
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
            logger.removeHandler(handler)
        logger.propagate = True


def errors_only(*, inherited: bool = True) -> None:
    """Let torch's C++ print errors and no warnings from now on, also after torch was imported. Does nothing if the user
    has chosen a level.

    Args:
        inherited: False: processes that this one starts keep their warnings.
    """
    if CPP_LEVEL in os.environ:
        return
    os.environ[CPP_LEVEL] = "ERROR"
    if torch := sys.modules.get("torch"):
        # Torch reads the variable at its import. A torch without this function keeps its warnings.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(Path(torch.__path__[0], "lib", "libc10.so")))._ZN3c1011initLoggingEv()
    if not inherited:
        del os.environ[CPP_LEVEL]


class _Handler(logging.Handler):
    """Writes records of libraries into the log; prints their errors, and all records of others, as Python's handler of
    last resort does."""

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
        except Exception:  # a logger must never end what it reports on
            self.handleError(record)
