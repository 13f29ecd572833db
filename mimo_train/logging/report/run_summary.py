"""The numbers in a run's report: the headline, the charts and the evaluation table."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mimo_train.layout.ranks import RunLayout
from mimo_train.logging.console import duration
from mimo_train.logging.report.charts import Chart, Column, Series, chart, smooth
from mimo_train.logging.report.layout_drawing import module_colors

_RATE = "learning_rate/"
COLORS = 6
_LOSS_COLOR, _HELD_OUT_COLOR, _MATCH_COLOR, _NORM_COLOR, _SPEED_COLOR = 0, 3, 2, 4, 5


def run_charts(data: dict[str, Column], layout: RunLayout) -> list[Chart]:
    """Return the charts that have values, the most important first."""
    if "consumed_samples" not in data:
        return []
    last_step = data["consumed_samples"].steps[-1]
    charts = [
        chart("Loss", "cross-entropy, nats per token", _loss_series(data), last_step=last_step),
        chart("Loss by source", "smoothed", _source_series(data), last_step=last_step, name_single=True),
        chart(
            "Held-out exact match",
            "answers equal to the truth",
            _match_series(data),
            last_step=last_step,
            y_range=(0, 1),
            y_format=lambda value: f"{value:.0%}" if value in (0, 1) else f"{100 * value:.3g}%",
        ),
        chart(
            "Gradient norm",
            "over all modules, before clipping",
            _raw_and_smooth(data.get("grad_norm"), "", _NORM_COLOR),
            last_step=last_step,
        ),
        chart("Learning rate", "per module", _rate_series(data, layout), last_step=last_step, name_single=True),
        chart(
            "Throughput",
            "tokens per second",
            _raw_and_smooth(data.get("tokens_per_second"), "", _SPEED_COLOR),
            last_step=last_step,
        ),
    ]
    return [one for one in charts if one is not None]


def _loss_series(data: dict[str, Column]) -> list[Series]:
    series = _raw_and_smooth(data.get("lm loss"), "training, ", _LOSS_COLOR)
    for number, key in enumerate(held_out_keys(data, "loss")):
        name = ", ".join(filter(None, ("held-out", set_of(key))))
        color = (_HELD_OUT_COLOR + number) % COLORS
        series.append(Series(name, data[key].steps, data[key].values, "dots", color))
    return series


def _match_series(data: dict[str, Column]) -> list[Series]:
    return [
        Series(
            set_of(key) or "exact match", data[key].steps, data[key].values, "dots", (_MATCH_COLOR + number) % COLORS
        )
        for number, key in enumerate(held_out_keys(data, "exact_match"))
    ]


def _source_series(data: dict[str, Column]) -> list[Series]:
    found = [(key.removeprefix("loss/"), column) for key, column in data.items() if key.startswith("loss/")]
    return [
        Series(name, column.steps, smooth(column.values, len(column.values) / 50), "line", number % COLORS)
        for number, (name, column) in enumerate(found)
    ]


def _raw_and_smooth(column: Column | None, prefix: str, color: int) -> list[Series]:
    if column is None:
        return []
    smoothed = smooth(column.values, len(column.values) / 50)
    return [
        Series(f"{prefix}each step", column.steps, column.values, "raw", color),
        Series(f"{prefix}smoothed", column.steps, smoothed, "line", color),
    ]


def _rate_series(data: dict[str, Column], layout: RunLayout) -> list[Series]:
    """Return one curve per module; modules with equal rates share one, because curves would hide each other."""
    colors = module_colors(layout)
    groups: list[tuple[list[str], Column]] = []
    for key, column in data.items():
        if not key.startswith(_RATE):
            continue
        name = key.removeprefix(_RATE)
        same = next((names for names, other in groups if other == column), None)
        if same is None:
            groups.append(([name], column))
        else:
            same.append(name)
    return [
        Series(", ".join(names), column.steps, column.values, "line", colors.get(names[-1], 0))
        for names, column in groups
    ]


_LONG = 10_000_000
"""Counts from here on are written in millions or billions."""


@dataclass(frozen=True)
class Number:
    """A number with its label and an optional detail, such as its total."""

    label: str
    value: str
    detail: str


def headline(data: dict[str, Column], iters: int) -> list[Number]:
    """Return the headline numbers that have metrics; `iters` is the run's target number of steps."""
    # Use the newest evaluation: the run may have had other sets before.
    newest = max(held_out_keys(data, "samples"), key=lambda key: data[key].steps[-1], default="eval/samples")
    at = newest.removesuffix("samples")
    numbers = [
        number
        for prefix, label in ((at, "Held-out"), ("test/", "Test"))
        for number in (
            _held_out(data, prefix, "exact_match", f"{label} exact match", lambda value: f"{value:.1%}"),
            _held_out(data, prefix, "loss", f"{label} loss", lambda value: f"{value:.4f}"),
        )
    ]
    if "consumed_samples" in data:
        steps = data["consumed_samples"].steps[-1]
        numbers.append(Number("Steps", f"{steps:,.0f}", f"of {iters:,}" if steps < iters else ""))
        numbers.append(Number("Samples", _count(data["consumed_samples"].values[-1]), "seen in training"))
    speed = _finite(data.get("tokens_per_second"))
    if speed:
        numbers.append(Number("Tokens per second", _count(statistics.median(speed)), "median"))
    seconds = _finite(data.get("step_seconds"))
    if seconds:
        total = statistics.fmean(seconds) * data["step_seconds"].steps[-1]
        each = f"{statistics.median(seconds):.3g} s per step, median"
        numbers.append(Number("Training time", duration(total), each))
    return [number for number in numbers if number is not None]


def held_out_keys(data: dict[str, Column], name: str) -> list[str]:
    """Return the keys of a number over held-out sets: the unnamed set, or each named set."""
    return [key for key in data if key.startswith("eval/") and key.endswith(f"/{name}")]


def set_of(key: str) -> str:
    """Return the name of a key's set; empty for the unnamed set."""
    return key.removeprefix("eval/").rpartition("/")[0]


def _held_out(data: dict[str, Column], at: str, what: str, label: str, name: Callable[[float], str]) -> Number | None:
    """Return the last value of `what` for the set with key prefix `at`."""
    key = f"{at}{what}"
    last = data[key].last_finite() if key in data else None
    if last is None:
        return None
    step, value = last
    samples, of_set = data.get(f"{at}samples"), set_of(key)
    count = f"{of_set}, " if of_set else ""
    count += f"{samples.values[-1]:,.0f} samples, " if samples else ""
    return Number(label, name(value), f"{count}step {step:,.0f}")


def _count(count: float) -> str:
    """Format as 1,280; 20.5 M; 4.1 B."""
    if count < _LONG:
        return f"{count:,.0f}"
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _finite(column: Column | None) -> list[float]:
    return [value for value in column.values if math.isfinite(value)] if column else []


_EVALUATION = ("eval/", "test/")
_MAX_ROWS = 50


@dataclass(frozen=True)
class EvaluationTable:
    """Column names after the step, and the cells of each step; values that were not measured are empty."""

    names: list[str]
    rows: list[tuple[str, list[str]]]
    evaluations: int
    """Total number of evaluations; the table has the last ones."""


def evaluation_table(data: dict[str, Column]) -> EvaluationTable | None:
    """Return the table, or None for a run without evaluations."""
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
    values = dict(zip(column.steps, column.values, strict=True))
    written = _number_format(key, [values[step] for step in steps if step in values])
    return [written(values[step]) if step in values else "" for step in steps]


def _number_format(key: str, values: Sequence[float]) -> Callable[[float], str]:
    """Return a column's number format: equal decimals make values easy to compare."""
    if key.endswith("/exact_match"):
        return lambda value: f"{value:.1%}" if math.isfinite(value) else f"{value}"
    finite = [abs(value) for value in values if math.isfinite(value)]
    largest = max(finite, default=0.0)
    if 0 < largest < 0.1:
        return lambda value: f"{value:.4g}"
    whole = all(value == int(value) for value in finite)
    decimals = 0 if whole else max(1, 4 - math.floor(math.log10(max(1.0, largest))))
    return lambda value: f"{value:,.{decimals}f}"
