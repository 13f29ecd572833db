"""metrics.jsonl: one JSON object a line, exact numbers, safe against kill -9, cut back when a run resumes.

A line is `{"step":1,"consumed_samples":32,"lm loss":5.1,...}`. Floats are written with the digits that give the same
float back, so equal runs give equal lines. JSON has no NaN and no infinity: they are the strings "NaN", "Infinity" and
"-Infinity", and `read_metrics` turns them back into floats.
"""

import json
import math
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path

from data.storage.replace import replacing
from mimo_train.config.fault import UserError

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Appends to metrics.jsonl; a line is on its way to the disk before `log` returns."""

    def __init__(self, path: Path, resumed_step: int):
        """Open `path` to go on after `resumed_step`: later lines and a torn last line are dropped.

        With `resumed_step` 0 the run is new, and the file starts empty.

        Raises:
            UserError: a line other than the last is no JSON object.
            OSError: the file cannot be written.
        """
        self.handle = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_back(path, resumed_step)
        # Line buffering hands each line to the system at once: a killed process loses at most the line it was writing.
        self._file = path.open("a", buffering=1, encoding="utf-8", newline="\n")

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write one line.

        Raises:
            OSError: the line cannot be written.
        """
        assert not {"step", "consumed_samples"} & set(values), f"reserved keys in {sorted(values)}"
        line: dict[str, int | float | str] = {"step": int(step), "consumed_samples": int(consumed_samples)}
        line |= {key: _to_json(value) for key, value in values.items()}
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every line of a metrics.jsonl, see `iter_metrics`."""
    return list(iter_metrics(path))


def iter_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The lines of a metrics.jsonl as dicts, one at a time; a torn last line is left out.

    Raises:
        UserError: a line other than the last is no JSON object.
        OSError: there is no such file.
    """
    for _, line in _lines(path):
        yield {key: _NOT_FINITE.get(value, value) for key, value in line.items()}


def _cut_back(path: Path, resumed_step: int) -> None:
    """Rewrite `path` with the lines up to `resumed_step` only."""
    with replacing(path) as file:
        if resumed_step > 0:
            for raw, line in _lines(path):
                if line["step"] <= resumed_step:
                    file.write(raw.rstrip(b"\n") + b"\n")


def _lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    """(raw line, object) of each whole line of `path`."""
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
