"""The numbers that a reader of a report looks for first."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from mimo_train.logging.console import duration
from mimo_train.logging.report.curves import Column

_LONG = 10_000_000
"""Counts from here on are written in millions or billions: all their digits do not fit."""


@dataclass(frozen=True)
class Number:
    """One number with its name, and what it is of or over; `detail` may be empty."""

    label: str
    value: str
    detail: str


def headline(data: dict[str, Column], iters: int) -> list[Number]:
    """The numbers for which there are metrics. `iters` is the number of steps that the run is to have."""
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
    """The name of the set of such a key, empty for that without a name."""
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
