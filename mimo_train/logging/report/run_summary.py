"""What the report of a run shows of its numbers: the headline, the charts and the table of evaluations."""

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
    """Return the charts for which there are values, the most important first."""
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
    """Exact match of every held-out set."""
    return [
        Series(
            set_of(key) or "exact match", data[key].steps, data[key].values, "dots", (_MATCH_COLOR + number) % COLORS
        )
        for number, key in enumerate(held_out_keys(data, "exact_match"))
    ]


def _source_series(data: dict[str, Column]) -> list[Series]:
    """Return the losses of the sources of a mixture, smoothed."""
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
    """One curve for each module; modules with equal rates share one, or they would hide each other."""
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
"""Counts from here on are written in millions or billions: all their digits do not fit."""


@dataclass(frozen=True)
class Number:
    """One number with its name, and what it is of or over; `detail` may be empty."""

    label: str
    value: str
    detail: str


def headline(data: dict[str, Column], iters: int) -> list[Number]:
    """Return the numbers for which there are metrics. `iters` is the number of steps that the run is to have."""
    # Of the newest evaluation: the run may have had other sets before.
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
    """The keys under which a number is measured of held-out sets: of the set without a name, or of each by its name."""
    return [key for key in data if key.startswith("eval/") and key.endswith(f"/{name}")]


def set_of(key: str) -> str:
    """Return the name of the set of such a key, empty for that without a name."""
    return key.removeprefix("eval/").rpartition("/")[0]


def _held_out(data: dict[str, Column], at: str, what: str, label: str, name: Callable[[float], str]) -> Number | None:
    """`what` of the set whose keys begin with `at`."""
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
    """1,280; 20.5 M; 4.1 B."""
    if count < _LONG:
        return f"{count:,.0f}"
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _finite(column: Column | None) -> list[float]:
    return [value for value in column.values if math.isfinite(value)] if column else []


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
    """Return the values at `steps`, in words."""
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
