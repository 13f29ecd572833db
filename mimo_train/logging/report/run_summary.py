"""The numbers in a run's report: the headline, the charts and the evaluation table."""

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from mimo_train.layout.ranks import RunLayout
from mimo_train.logging.console import duration
from mimo_train.logging.report.charts import Chart, Column, Series, chart, short, smooth
from mimo_train.logging.report.layout_drawing import module_colors

COLORS = 6
_LOSS_COLOR, _HELD_OUT_COLOR, _MATCH_COLOR, _NORM_COLOR, _SPEED_COLOR = 0, 3, 2, 4, 5
_MAX_ROWS = 50
"""Most rows of the evaluation table."""


def run_charts(data: dict[str, Column], layout: RunLayout) -> list[Chart]:
    """Return the charts that have values, the most important first."""
    if "consumed_samples" not in data:
        return []
    last_step = data["consumed_samples"].steps[-1]
    is_sft = "lm loss" in data
    losses = _raw_and_smooth(data, "lm loss" if is_sft else "loss", "training, ", _LOSS_COLOR)
    losses += _held_out_series(data, "loss", "held-out", _HELD_OUT_COLOR)
    sources = [(key.removeprefix("loss/"), column) for key, column in data.items() if key.startswith("loss/")]
    by_source = [
        Series(name, column.steps, smooth(column.values, len(column.values) / 50), "line", number % COLORS)
        for number, (name, column) in enumerate(sources)
    ]
    accuracies = _raw_and_smooth(data, "rewards/accuracies", "training, ", _MATCH_COLOR)
    accuracies += _held_out_series(data, "rewards/accuracies", "held-out", _HELD_OUT_COLOR)
    norms = _raw_and_smooth(data, "grad_norm", "", _NORM_COLOR)
    speeds = _raw_and_smooth(data, "tokens_per_second", "", _SPEED_COLOR)
    charts = [
        chart("Loss", "cross-entropy, nats per token" if is_sft else "of the task", losses, last_step=last_step),
        chart(
            "Reward accuracy",
            "pairs whose chosen answer has the higher reward",
            accuracies,
            last_step=last_step,
            y_range=(0, 1),
        ),
        chart("Loss by source", "smoothed", by_source, last_step=last_step),
        chart(
            "Held-out exact match",
            "answers equal to the truth",
            _held_out_series(data, "exact_match", "exact match", _MATCH_COLOR),
            last_step=last_step,
            y_range=(0, 1),
            y_format=lambda value: f"{100 * value:.3g}%",
        ),
        chart("Gradient norm", "over all modules, before clipping", norms, last_step=last_step),
        chart("Learning rate", "per module", _rate_series(data, layout), last_step=last_step),
        chart("Throughput", "tokens per second", speeds, last_step=last_step),
    ]
    return [each for each in charts if each is not None]


def _raw_and_smooth(data: dict[str, Column], key: str, prefix: str, color: int) -> list[Series]:
    if key not in data:
        return []
    column = data[key]
    smoothed = smooth(column.values, len(column.values) / 50)
    return [
        Series(f"{prefix}each step", column.steps, column.values, "raw", color),
        Series(f"{prefix}smoothed", column.steps, smoothed, "line", color),
    ]


def _held_out_series(data: dict[str, Column], name: str, label: str, color: int) -> list[Series]:
    return [
        Series(
            key[len("eval/") : -len(name)].rstrip("/") or label,
            data[key].steps,
            data[key].values,
            "dots",
            (color + number) % COLORS,
        )
        for number, key in enumerate(held_out_keys(data, name))
    ]


def _rate_series(data: dict[str, Column], layout: RunLayout) -> list[Series]:
    """Return one curve per module; modules with equal rates share one, because curves would hide each other."""
    colors = module_colors(layout)
    groups: list[tuple[list[str], Column]] = []
    for key, column in data.items():
        _, is_rate, name = key.partition("learning_rate/")
        if is_rate:
            same = next((names for names, other in groups if other == column), None)
            if same is None:
                groups.append(([name], column))
            else:
                same.append(name)
    return [
        Series(", ".join(names), column.steps, column.values, "line", colors.get(names[-1], 0))
        for names, column in groups
    ]


class Number(NamedTuple):
    """A number with its label and an optional detail, such as its total."""

    label: str
    value: str
    detail: str


def headline(data: dict[str, Column], iters: int) -> list[Number]:
    """Return the headline numbers that have metrics; `iters` is the run's target number of steps."""
    # Use the newest evaluation: the run may have had other sets before.
    newest = max(held_out_keys(data, "samples"), key=lambda key: data[key].steps[-1], default="eval/samples")
    tests = [key.removesuffix("samples") for key in data if key.startswith("test/") and key.endswith("/samples")]
    numbers = []
    for prefix, label in ((newest.removesuffix("samples"), "Held-out"), *((prefix, "Test") for prefix in tests)):
        for name, form in (("exact_match", "{:.1%}"), ("loss", "{:.4f}")):
            last = data[f"{prefix}{name}"].last_finite() if f"{prefix}{name}" in data else None
            if last is not None:
                samples = data.get(f"{prefix}samples")
                count = f"{samples.values[-1]:,.0f} samples" if samples else ""
                detail = ", ".join(filter(None, [set_of(f"{prefix}{name}"), count, f"step {last[0]:,.0f}"]))
                numbers.append(Number(f"{label} {name.replace('_', ' ')}", form.format(last[1]), detail))
    if "consumed_samples" in data:
        steps = data["consumed_samples"].steps[-1]
        numbers.append(Number("Steps", f"{steps:,.0f}", f"of {iters:,}" if steps < iters else ""))
        numbers.append(Number("Samples", short(data["consumed_samples"].values[-1]), "seen in training"))
    if speed := _finite(data, "tokens_per_second"):
        numbers.append(Number("Tokens per second", short(statistics.median(speed)), "median"))
    if seconds := _finite(data, "step_seconds"):
        total = statistics.fmean(seconds) * data["step_seconds"].steps[-1]
        each = f"{statistics.median(seconds):.3g} s per step, median"
        numbers.append(Number("Training time", duration(total), each))
    return numbers


def held_out_keys(data: dict[str, Column], name: str) -> list[str]:
    """Return the keys of a number over held-out sets: the unnamed set, or each named set."""
    return [key for key in data if key.startswith("eval/") and key.endswith(f"/{name}")]


def set_of(key: str) -> str:
    """Return the name of a key's set; empty for unnamed sets."""
    return "/".join(key.split("/")[1:-1])


def _finite(data: dict[str, Column], key: str) -> list[float]:
    return [value for value in data[key].values if math.isfinite(value)] if key in data else []


@dataclass(frozen=True)
class EvaluationTable:
    """Column names after the step, and the cells of each step; values that were not measured are empty."""

    names: list[str]
    rows: list[tuple[str, list[str]]]
    evaluations: int
    """Total number of evaluations; the table has the last ones."""


def evaluation_table(data: dict[str, Column]) -> EvaluationTable | None:
    """Return the table, or None for a run without evaluations."""
    by_key = {
        key: dict(zip(column.steps, column.values, strict=True))
        for key, column in data.items()
        if key.startswith(("eval/", "test/"))
    }
    steps = sorted({step for values in by_key.values() for step in values})
    if not steps:
        return None
    return EvaluationTable(
        names=[key.removeprefix("eval/").replace("_", " ") for key in by_key],
        rows=[
            (f"{step:,.0f}", [_cell(key, values[step]) if step in values else "" for key, values in by_key.items()])
            for step in steps[-_MAX_ROWS:]
        ],
        evaluations=len(steps),
    )


def _cell(key: str, value: float) -> str:
    is_share = key.endswith("/exact_match") and math.isfinite(value)
    return f"{value:.1%}" if is_share else f"{value:,.5g}"
