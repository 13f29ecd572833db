"""metrics.jsonl: one JSON object per line with exact numbers, safe against kill -9, truncated when a run resumes.

A line is `{"step":1,"consumed_samples":32,"lm loss":5.1,...}`. Floats are written to round-trip exactly, so equal runs
give equal lines. NaN and infinities, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity";
`read_metrics` turns them back into floats.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from data.storage.files import replacing
from data.text_format import plural
from mimo_train.config.errors import UserError

_logger = logging.getLogger(__name__)

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Append to metrics.jsonl; a line is handed to the operating system before `log` returns.

    If the disk is full or read-only, lines are held back and retried with the next line. The file has every line, or
    `close` raises.
    """

    def __init__(self, path: Path, resumed_step: int):
        """Continue `path` after `resumed_step`: drop later lines and a torn last line; 0 starts an empty file.

        Raises:
            UserError: a line other than the last is not a JSON object.
            OSError: the file cannot be written.
        """
        self.handle = path
        self._held_back, self._has_failed = b"", False
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            if resumed_step > 0 and path.exists():
                for raw, line in _lines(path):
                    if line["step"] <= resumed_step:
                        file.write(raw.rstrip(b"\n") + b"\n")

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write one line."""
        assert not {"step", "consumed_samples"} & set(values), f"reserved keys in {sorted(values)}"
        line: dict[str, int | float | str] = {"step": int(step), "consumed_samples": int(consumed_samples)}
        line |= {key: _to_json(value) for key, value in values.items()}
        self._held_back += json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                _logger.warning("%s cannot be written (%s): its lines are held back until it can", self.handle, error)
            self._has_failed = True
        else:
            self._has_failed = False

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write nothing: predictions have files of their own."""

    def close(self) -> None:
        """Write the held-back lines. Raises UserError if they cannot be written."""
        try:
            self._write()
        except OSError as error:
            raise UserError(
                f"run.dir: the last {plural(self._held_back.count(b'\n'), 'line')} of {self.handle} could not be "
                f"written ({error}). The same command resumes the run from its newest checkpoint and writes them again"
            ) from error

    def _write(self) -> None:
        """Write all held-back lines. A write that ends inside a line continues there."""
        if not self._held_back:
            return
        # Opened by name for each line, so that a file that was moved or replaced gets no lines.
        self.handle.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.handle, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while self._held_back:
                self._held_back = self._held_back[os.write(file, self._held_back) :]
        finally:
            os.close(file)


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


def _lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json.loads(raw)
            except ValueError as error:
                line, reason = None, str(error)
            else:
                numbered = isinstance(line, dict) and isinstance(line.get("step"), int | float)
                reason = "" if numbered else "not an object with a number as its step"
            if reason:
                if not raw.endswith(b"\n"):
                    return
                raise UserError(
                    f"{path}, line {number}, is not a line of metrics ({reason}). Remove this line to continue"
                )
            yield raw, line


def _to_json(value: float | Integral) -> int | float | str:
    if isinstance(value, Integral):
        return int(value)
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
