"""Send library warnings to the log of a rank, so that the console shows only the run.

Importing Megatron-Core 0.19.2 prints a dozen irrelevant warnings on every rank. Warnings of mimo-train and of user
modules, and errors of libraries, stay on the console.
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
"""On the CPU every torch call passes through this file, so warnings about the caller name it."""
CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"


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
