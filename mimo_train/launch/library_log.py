"""Warnings of libraries go to a file, so that the console shows the run itself. Imports no torch.

Importing Megatron-Core 0.19.2 warns a dozen times on every rank, on most machines of things that do not concern the
run. What mimo-train or the user's own modules warn of stays on the console, and so do errors of libraries.
"""

import json
import logging
import os
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mimo_train.launch.import_guard import HOME, NAMES
from mimo_train.launch.rank_log import RankLog
from mimo_train.launch.temp_dir import SCRATCH

OWN = tuple(f"{HOME / name}{os.sep}" for name in (*NAMES, "mimo_train"))
LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for key in ("purelib", "platlib", "stdlib", "platstdlib")
    for folder in {sysconfig.get_path(key), os.path.realpath(sysconfig.get_path(key))}
)
_HELD = "imports.json"
"""In the launcher's folder."""
STAND_IN = str(HOME / "mimo_train" / "parallel" / "cuda_stand_in.py")
"""On the CPU every call of torch passes through it, so that warnings about the caller name this file."""


def is_library(file: str) -> bool:
    """Whether a source file belongs to a library: not to mimo-train, and not to modules of the user."""
    file = os.path.abspath(file)
    return file == STAND_IN or (file.startswith(LIBRARIES) and not file.startswith(OWN))


def divert(path: Path) -> RankLog:
    """Send warnings and log records of libraries, below errors, to the end of a file from now on; the file is made when
    there is one. They stay on the console if it cannot be written, and where TORCH_LOGS asks torch for its own.

    Called before the libraries are imported, and `adopt_torch` after torch was. What a launcher has `held` of its
    import comes first.

    Returns:
        The file's log.
    """
    log = RankLog(path)
    with suppress(KeyError, OSError):
        for text in json.loads(Path(os.environ[SCRATCH], _HELD).read_text()):
            log.write(text)
    _divert(log)
    return log


def divert_of(command: str, run_dir: Path | None) -> None:
    """As `divert`, of a command that looks at a run: into `logs/COMMAND.log` of the run's folder. Of what has no such
    folder on this machine, as a model of transformers, what libraries warn of is left out."""
    if run_dir is None:
        _divert(_Nowhere())
    else:
        divert(run_dir / "logs" / f"{command}.log")


@contextmanager
def held() -> Iterator[list[str]]:
    """A block whose warnings and log records of libraries, as of `divert`, are kept for the logs of ranks; those so
    far."""
    log = _Held()
    console = warnings.showwarning
    handler = _divert(log)
    try:
        yield log.texts
    finally:
        warnings.showwarning = console
        logging.getLogger().removeHandler(handler)


def hand_on(texts: list[str], scratch: Path) -> None:
    """Leave what was held in the launcher's folder, for its ranks."""
    if texts:
        (scratch / _HELD).write_text(json.dumps(texts))


class _Held:
    """In the place of a rank's log."""

    has_console = False

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        self.texts.append(text)


class _Nowhere:
    """In the place of a rank's log."""

    has_console = False

    def write(self, text: str) -> None:
        """Leave it out."""


def _divert(log: "RankLog | _Held | _Nowhere") -> logging.Handler:
    """Returns the handler of log records, which was added to those of the root."""
    console = warnings.showwarning

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
    handler = _Handler(log)
    logging.getLogger().addHandler(handler)
    return handler


def adopt_torch() -> None:
    """Leave the records of torch's loggers to the handlers of `divert`: torch gives each its own, which prints them."""
    if "TORCH_LOGS" in os.environ:
        return
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
            logger.removeHandler(handler)
        logger.propagate = True


class _Handler(logging.Handler):
    """Records of libraries into the file; errors of theirs, and everything of others, on the console, as Python's
    handler of last resort prints them."""

    def __init__(self, log: RankLog | _Held | _Nowhere):
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
