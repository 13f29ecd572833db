"""metrics.jsonl: one JSON object per line with exact numbers, safe against kill -9, truncated when a run resumes.

A line is `{"step":1,"consumed_samples":32,"lm loss":5.1,...}`. Floats are written to round-trip exactly, so equal runs
give equal lines. NaN and infinities, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity";
`read_metrics` turns them back into floats.
"""

import json
import logging
import math
import os
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path

from data.storage.files import replacing
from data.text_format import plural
from mimo_train.config.errors import UserError

_logger = logging.getLogger(__name__)

_PIECE = 2**20
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Append to metrics.jsonl; a line is handed to the operating system before `log` returns.

    If the disk is full or read-only, lines are held back and retried with the next line. A file that was removed is
    written again. The file has every line, or `close` raises.
    """

    def __init__(self, path: Path, resumed_step: int):
        """Open `path` to continue after `resumed_step`: drop later lines and a torn last line.

        With `resumed_step` 0 the file starts empty.

        Raises:
            UserError: a line other than the last is not a JSON object.
            OSError: the file cannot be written.
        """
        self.handle = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_back(path, resumed_step)
        self._file: int | None = _opened(path)
        self._held_back, self._warned = b"", False

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write one line."""
        assert not {"step", "consumed_samples"} & set(values), f"reserved keys in {sorted(values)}"
        line: dict[str, int | float | str] = {"step": int(step), "consumed_samples": int(consumed_samples)}
        line |= {key: _to_json(value) for key, value in values.items()}
        self._held_back += json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                _logger.warning("%s cannot be written (%s): its lines are held back until it can", self.handle, error)
            self._warned = True
        else:
            self._warned = False

    def close(self) -> None:
        """Write the held-back lines and close the file. Raises UserError if some lines cannot be written."""
        try:
            self._write()
        except OSError as error:
            lines = self._held_back.count(b"\n")
            what = (
                f"the last {plural(lines, 'line')} of {self.handle}" if lines else f"{self.handle}, which was removed,"
            )
            raise UserError(
                f"run.dir: {what} could not be written ({error}): the same command "
                "continues the run from its newest complete checkpoint, and writes those behind it again"
            ) from error
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self) -> None:
        """Write all held-back lines. A write that ends inside a line continues there."""
        if self._file is not None and not self._is_in_place():
            self.handle.parent.mkdir(parents=True, exist_ok=True)
            done = "another file has its name: lines go on there" if self.handle.exists() else self._put_back()
            opened = _opened(self.handle)
            os.close(self._file)
            self._file = opened
            _logger.warning("%s was removed or moved: %s", self.handle, done)
        while self._held_back and self._file is not None:
            self._held_back = self._held_back[os.write(self._file, self._held_back) :]

    def _put_back(self) -> str:
        """Write a removed file again from its open descriptor. A renamed file keeps its lines under the new name."""
        assert self._file is not None
        if os.fstat(self._file).st_nlink:
            return "one is begun with the next line"
        with replacing(self.handle) as file:
            at = 0
            while piece := os.pread(self._file, _PIECE, at):
                file.write(piece)
                at += len(piece)
        return "it is written again, with all its lines"

    def _is_in_place(self) -> bool:
        assert self._file is not None
        try:
            there, mine = os.stat(self.handle), os.fstat(self._file)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return every line of a metrics.jsonl, see `iter_metrics`."""
    return list(iter_metrics(path))


def iter_metrics(path: str | Path) -> Iterator[dict[str, float]]:
    """Yield the lines of a metrics.jsonl as dicts; a torn last line is skipped.

    Raises:
        UserError: a line other than the last is not a JSON object.
        OSError: there is no such file.
    """
    for _, line in _lines(Path(path)):
        yield {key: _NOT_FINITE.get(value, value) for key, value in line.items()}


def _opened(path: Path) -> int:
    # Unbuffered: a killed process loses at most the line that it was writing.
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)


def _cut_back(path: Path, resumed_step: int) -> None:
    """Keep only the lines up to `resumed_step`."""
    with replacing(path) as file:
        if resumed_step > 0:
            for raw, line in _lines(path):
                if line["step"] <= resumed_step:
                    file.write(raw.rstrip(b"\n") + b"\n")


def _lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json.loads(raw)
            except ValueError as error:
                line, why = None, str(error)
            else:
                numbered = isinstance(line, dict) and isinstance(line.get("step"), int | float)
                why = "" if numbered else "not an object with a number as its step"
            if why:
                if not raw.endswith(b"\n"):
                    return
                raise UserError(f"{path}, line {number}, is not a line of metrics ({why}): remove this line to go on")
            yield raw, line


def _to_json(value: float | Integral) -> int | float | str:
    if isinstance(value, Integral):
        return int(value)
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
