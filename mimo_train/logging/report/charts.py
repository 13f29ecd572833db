"""Line charts: curves of metrics.jsonl (columns, smoothing, thinning), axes and ticks, drawn by
templates/chart.html.j2.

The drawing has a fixed box of 1000 x 1000 that stretches to the available room; strokes do not stretch. Labels are text
outside the box, placed by percentages, so they keep their size on a phone.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from data.text_format import listed

_BOX = 1000
_MAX_DOTS = 100
"""Most points drawn as dots; beyond that the line alone is clearer."""

_SAME = 1e-6
"""Relative difference below which values are equal: a smoothed constant varies by rounding."""


@dataclass(frozen=True)
class Series:
    """One curve. `kind`: raw (thin and pale), line, or dots (joined by a dashed line); `color`: 0 to 5."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    kind: str = "line"
    color: int = 0


@dataclass(frozen=True)
class Axis:
    """Range of an axis, its scale and its ticks."""

    low: float
    high: float
    log: bool
    ticks: list[float]

    def place(self, value: float) -> float:
        """Return the position of `value`: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Dot(NamedTuple):
    """A point of a curve: "x y" in the box, and its value in words."""

    place: str
    title: str


@dataclass(frozen=True)
class Curve:
    """A series as an SVG path in the box."""

    series: Series
    path: str
    dots: list[Dot]


@dataclass(frozen=True)
class Chart:
    """Values for the chart template. Ticks are (label, distance from the left or the top in percent)."""

    title: str
    y_name: str
    summary: str
    """Text alternative of the chart."""
    curves: list[Curve]
    grid: str
    """SVG path of the lines at the y ticks, without the base line."""
    y_ticks: list[tuple[str, str]]
    x_ticks: list[tuple[str, str]]
    note: str
    """Note about values that cannot be drawn, or empty."""
    x_name: str = "step"
    """Unit of the x axis."""
    box: int = _BOX


def short(value: float) -> str:
    """Return a short form of a number: 0.02, 800, 5,000, 20k, 1.5M, 4.1B."""
    for scale, unit, least in ((1e9, "B", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if abs(value) >= least:
            return f"{value / scale:,.4g}{unit}"
    return f"{value:,.4g}"


def chart(
    title: str,
    y_name: str,
    series: list[Series],
    *,
    last_step: float,
    y_range: tuple[float, float] | None = None,
    y_format: Callable[[float], str] = short,
    x_name: str = "step",
) -> Chart | None:
    """Return the chart of curves over steps, or another unit `x_name`, from 0 to `last_step`; None without values."""
    drawn = [(each, thin(each.steps, each.values)) for each in series]
    values = [value for _, points in drawn for _, value in points if value is not None]
    if not values:
        return None
    last_step = max(1.0, last_step)
    ticks = [tick for tick in linear_axis(0, last_step, 6).ticks if tick <= last_step]
    whole_steps = [tick for tick in ticks if tick == int(tick) or x_name != "step"]
    x_axis = Axis(0, last_step, False, whole_steps)  # ends at the last step, so that curves fill the width
    main = [value for each, points in drawn for _, value in points if value is not None and each.kind != "raw"]
    y_axis = linear_axis(*y_range, 6) if y_range else value_axis(values, main or values)
    return Chart(
        title=title,
        y_name=y_name + (" (log scale)" if y_axis.log else ""),
        summary=" ".join([f"{title}.", *(_summary(each, y_format, x_name) for each in series if each.kind != "raw")]),
        curves=[_curve(each, points, x_axis, y_axis, y_format, x_name) for each, points in drawn],
        grid="".join(f"M0 {_BOX * (1 - y_axis.place(tick)):.1f}h{_BOX}" for tick in y_axis.ticks[1:]),
        y_ticks=[(y_format(tick), f"{100 * (1 - y_axis.place(tick)):.2f}") for tick in y_axis.ticks],
        x_ticks=[(short(tick), f"{100 * x_axis.place(tick):.2f}") for tick in x_axis.ticks],
        note=_note(series),
        x_name=x_name,
    )


def value_axis(values: Sequence[float], main: Sequence[float]) -> Axis:
    """Return the axis that shows all `values`; `main` are the values without noise. It is logarithmic if the main
    values span two decades, or if a spike would flatten them."""
    low, high = min(values), max(values)
    if low > 0 and (max(main) > 100 * min(main) or high > 20 * max(main)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, math.ceil((last - first) / 6))
        return Axis(10.0**first, 10.0**last, True, [10.0**power for power in range(first, last + 1, every)])
    if high - low <= _SAME * max(abs(low), abs(high)):
        low, high = (0.0, 1.25 * high or 1.0) if low >= 0 else (1.25 * low, 0.0)
    if 0 < low < 0.4 * high:
        low = 0.0
    return linear_axis(low, high, 5)


def linear_axis(low: float, high: float, count: int) -> Axis:
    """Return an axis with about `count` ticks at round distances (1, 2 or 5 times a power of ten), ending on ticks."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], False, ticks)


def _curve(
    series: Series,
    points: list[tuple[float, float | None]],
    x_axis: Axis,
    y_axis: Axis,
    name: Callable[[float], str],
    x_name: str,
) -> Curve:
    """Return the curve, broken at gaps. Dots mark all points (kind dots) and single points between gaps."""
    segments: list[list[Dot]] = [[]]
    for step, value in points:
        if value is None:
            segments.append([])
            continue
        place = f"{_BOX * x_axis.place(step):.1f} {_BOX * (1 - y_axis.place(value)):.1f}"
        segments[-1].append(Dot(place, f"{series.label}, {_position(step, x_name)}: {name(value)}"))
    every = series.kind == "dots" and len(points) <= _MAX_DOTS
    return Curve(
        series,
        path="".join("M" + "L".join(dot.place for dot in segment) for segment in segments if segment),
        dots=[dot for segment in segments if every or len(segment) == 1 for dot in segment],
    )


def _position(step: float, x_name: str) -> str:
    return f"step {step:,.0f}" if x_name == "step" else f"{short(step)} {x_name}"


def _summary(series: Series, name: Callable[[float], str], x_name: str) -> str:
    finite = [pair for pair in zip(series.steps, series.values, strict=True) if math.isfinite(pair[1])]
    if not finite:
        return ""
    (start, first), (end, last), values = finite[0], finite[-1], [value for _, value in finite]
    return (
        f"{series.label}: {name(first)} at {_position(start, x_name)}, {name(last)} at {_position(end, x_name)}, "
        f"lowest {name(min(values))}, highest {name(max(values))}."
    )


def _note(series: list[Series]) -> str:
    pairs = (pair for each in series for pair in zip(each.steps, each.values, strict=True))
    steps = sorted({step for step, value in pairs if not math.isfinite(value)})
    if not steps:
        return ""
    return f"NaN or infinite at step {listed([f'{step:,.0f}' for step in steps], 5)}."


@dataclass
class Column:
    """The values of one key, and their steps."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))

    def last_finite(self) -> tuple[float, float] | None:
        """Return (step, value) of the last finite value, or None."""
        pairs = zip(reversed(self.steps), reversed(self.values), strict=True)
        return next(((step, value) for step, value in pairs if math.isfinite(value)), None)


def columns(lines: Iterable[dict[str, float]]) -> dict[str, Column]:
    """Return the lines as columns by key. It streams, so that a long run needs 16 bytes per number."""
    by_key: dict[str, Column] = {}
    for line in lines:
        for key, value in line.items():
            if key != "step" and isinstance(value, (int, float)):
                column = by_key.setdefault(key, Column())
                column.steps.append(line["step"])
                column.values.append(value)
    return by_key


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Return a centred moving average over about `window` values; NaN and infinities stay gaps. Weights decay
    exponentially on both sides: an average of the past alone lags behind a falling curve."""
    before, after = _decaying_sums(values, window), reversed(_decaying_sums(values[::-1], window))
    return [
        (total + other) / (weight + more) if math.isfinite(value) else math.nan
        for value, (total, weight), (other, more) in zip(values, before, after, strict=True)
    ]


def _decaying_sums(values: Sequence[float], window: float) -> list[tuple[float, float]]:
    """Return (sum, sum of weights) of the values so far, with weights that decay with distance."""
    keep = 1 - 1 / max(1.0, window)
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1
        sums.append((total, weight))
    return sums


def thin(steps: Sequence[float], values: Sequence[float], max_points: int = 1000) -> list[tuple[float, float | None]]:
    """Return about `max_points` points: each bucket's lowest and highest value, so that spikes stay visible. A bucket
    without a finite value becomes (step, None): a gap in the curve."""
    count = len(values)
    if count <= max_points:
        return [(step, value if math.isfinite(value) else None) for step, value in zip(steps, values, strict=True)]
    buckets = max(1, max_points // 2)
    points: list[tuple[float, float | None]] = []
    for bucket in range(buckets):
        indexes = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [index for index in indexes if math.isfinite(values[index])]
        if not finite:
            points.append((steps[indexes[0]], None))
            continue
        ends = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        points += [(steps[index], values[index]) for index in sorted(ends)]
    return points
