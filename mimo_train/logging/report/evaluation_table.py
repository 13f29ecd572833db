"""The evaluations of a run as a table: the held-out curves as numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mimo_train.logging.report.curves import Column

_EVALUATION = ("eval/", "test/")
_MAX_ROWS = 50
"""Evaluations in the table."""


@dataclass(frozen=True)
class EvaluationTable:
    """Names of the columns behind the step, and for each step its cells; a value that was not measured is empty."""

    names: list[str]
    rows: list[tuple[str, list[str]]]
    evaluations: int
    """How many there were; the table has the last of them."""


def evaluation_table(data: dict[str, Column]) -> EvaluationTable | None:
    """None for a run without evaluations."""
    keys = [key for key in data if key.startswith(_EVALUATION)]
    steps = sorted({step for key in keys for step in data[key].steps})
    if not steps:
        return None
    shown = steps[-_MAX_ROWS:]
    cells = [_cells(key, data[key], shown) for key in keys]
    return EvaluationTable(
        names=[key.removeprefix("eval/").replace("_", " ") for key in keys],
        rows=[(f"{step:,.0f}", list(row)) for step, row in zip(shown, zip(*cells, strict=True), strict=True)],
        evaluations=len(steps),
    )


def _cells(key: str, column: Column, steps: list[float]) -> list[str]:
    """The values at `steps`, in words."""
    values = dict(zip(column.steps, column.values, strict=True))
    written = _number_format(key, [values[step] for step in steps if step in values])
    return [written(values[step]) if step in values else "" for step in steps]


def _number_format(key: str, values: Sequence[float]) -> Callable[[float], str]:
    """How the values of a column are written: with equally many decimals, so that they can be compared at a glance."""
    if key.endswith("/exact_match"):
        return lambda value: f"{value:.1%}" if math.isfinite(value) else f"{value}"
    finite = [abs(value) for value in values if math.isfinite(value)]
    largest = max(finite, default=0.0)
    if 0 < largest < 0.1:
        return lambda value: f"{value:.4g}"
    whole = all(value == int(value) for value in finite)
    decimals = 0 if whole else max(1, 4 - math.floor(math.log10(max(1.0, largest))))
    return lambda value: f"{value:,.{decimals}f}"
