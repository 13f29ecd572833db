"""Line charts: curves of metrics.jsonl (columns, smoothing, thinning), axes and ticks, drawn by
templates/chart.html.j2.

The drawing has a fixed box of 1000 x 1000 that stretches to the available room; strokes do not stretch. Labels are text
outside the box, placed by percentages, so they keep their size on a phone.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Tick:
    """A label of an axis, and its distance from the left or the top in percent."""

    label: str
    percent: str


@dataclass(frozen=True)
class Dot:
    """A point of a curve: "x y" in the box, and its value in words."""

    place: str
    title: str


@dataclass(frozen=True)
class Curve:
    """A curve as an SVG path in the box."""

    label: str
    kind: str
    color: int
    path: str
    dots: list[Dot]


@dataclass(frozen=True)
class Chart:
    """Values for the chart template."""

    title: str
    y_name: str
    summary: str
    """Text alternative of the chart."""
    curves: list[Curve]
    has_legend: bool
    grid: str
    """SVG path of the lines at the y ticks, without the base line."""
    y_ticks: list[Tick]
    x_ticks: list[Tick]
    note: str
    """Note about values that cannot be drawn, or empty."""
    box: int = _BOX


def chart(
    title: str,
    y_name: str,
    series: list[Series],
    *,
    last_step: float,
    y_range: tuple[float, float] | None = None,
    y_format: Callable[[float], str] | None = None,
    name_single: bool = False,
) -> Chart | None:
    """Return the chart of curves over steps 0 to `last_step`; None without values. A single curve has no legend, unless
    `name_single`: the title names it."""
    drawn = [(one, thin(one.steps, one.values)) for one in series]
    values = [value for _, points in drawn for _, value in points if value is not None]
    if not values:
        return None
    x_axis = _step_axis(max(1.0, last_step))
    main = [value for one, points in drawn for _, value in points if value is not None and one.kind != "raw"]
    y_axis = linear_axis(*y_range, 6) if y_range else value_axis(values, main or values)
    name = y_format or number_format(y_axis)
    exact = y_format or _exact
    return Chart(
        title=title,
        y_name=y_name + (" (log scale)" if y_axis.log else ""),
        summary=_summary(title, series, exact),
        curves=[_curve(one, points, x_axis, y_axis, exact) for one, points in drawn],
        has_legend=len(series) > 1 or name_single,
        grid="".join(f"M0 {_BOX * (1 - y_axis.place(tick)):.1f}h{_BOX}" for tick in y_axis.ticks[1:]),
        y_ticks=[Tick(name(tick), f"{100 * (1 - y_axis.place(tick)):.2f}") for tick in y_axis.ticks],
        x_ticks=[Tick(short_count(tick), f"{100 * x_axis.place(tick):.2f}") for tick in x_axis.ticks],
        note=_not_finite(series),
    )


def value_axis(values: Sequence[float], main: Sequence[float]) -> Axis:
    """Return the axis that shows all `values`; `main` are the values without noise. It is logarithmic if the main
    values span two decades, or if a spike would flatten them."""
    low, high = min(values), max(values)
    if low > 0 and (max(main) > 100 * min(main) or high > 20 * max(main)):
        return _log_axis(low, high)
    if high - low <= _SAME * max(abs(low), abs(high)):
        low, high = (0.0, 1.25 * high or 1.0) if low >= 0 else (1.25 * low, 0.0)
    if 0 < low < 0.4 * high:
        low = 0.0
    return linear_axis(low, high, 5)


def linear_axis(low: float, high: float, count: int, whole: bool = False) -> Axis:
    """Return an axis with about `count` ticks at round distances (1, 2 or 5 times a power of ten), ending on ticks."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], False, ticks)


def _step_axis(last_step: float) -> Axis:
    """Return an axis from 0 to exactly `last_step`, so that curves fill the width."""
    ticks = linear_axis(0, last_step, 6, whole=True).ticks
    return Axis(0, last_step, False, [tick for tick in ticks if tick <= last_step])


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    ticks = [10.0**exponent for exponent in range(first, last + 1, every)]
    return Axis(10.0**first, 10.0**last, True, ticks)


def number_format(axis: Axis) -> Callable[[float], str]:
    """Return the format of an axis's ticks: the decimals they need, thousands, or powers of ten."""
    largest = max(abs(axis.low), abs(axis.high))
    if axis.log or largest >= 1e9 or largest < 1e-2:
        return _short
    if largest >= 1e5:
        return short_count
    step = axis.ticks[1] - axis.ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return lambda value: f"{value:,.{decimals}f}"


def _short(value: float) -> str:
    """Format with two significant digits: 0.02, 3e-4, 1.5e9."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def short_count(count: float) -> str:
    """Return a short form of a count: 800, 5,000, 20k, 1.5M."""
    if abs(count) >= 1e6:
        return f"{count / 1e6:g}M"
    return f"{count / 1e3:g}k" if abs(count) >= 1e4 else f"{count:,.0f}"


def _exact(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _curve(
    one: Series, points: list[tuple[float, float | None]], x_axis: Axis, y_axis: Axis, name: Callable[[float], str]
) -> Curve:
    """Return the curve, broken at gaps. Dots mark all points (kind dots) and single points between gaps."""
    segments: list[list[Dot]] = [[]]
    for step, value in points:
        if value is None:
            segments.append([])
            continue
        place = f"{_BOX * x_axis.place(step):.1f} {_BOX * (1 - y_axis.place(value)):.1f}"
        segments[-1].append(Dot(place, f"{one.label}, step {step:,.0f}: {name(value)}"))
    every = one.kind == "dots" and len(points) <= _MAX_DOTS
    return Curve(
        one.label,
        one.kind,
        one.color,
        path="".join("M" + "L".join(dot.place for dot in segment) for segment in segments if segment),
        dots=[dot for segment in segments if every or len(segment) == 1 for dot in segment],
    )


def _summary(title: str, series: list[Series], name: Callable[[float], str]) -> str:
    sentences = []
    for one in series:
        finite = [(step, value) for step, value in zip(one.steps, one.values, strict=True) if math.isfinite(value)]
        if finite and one.kind != "raw":
            (start, first), (end, last) = finite[0], finite[-1]
            low, high = min(value for _, value in finite), max(value for _, value in finite)
            sentences.append(
                f"{one.label}: {name(first)} at step {start:,.0f}, {name(last)} at step {end:,.0f}, "
                f"lowest {name(low)}, highest {name(high)}."
            )
    return " ".join([f"{title}.", *sentences])


def _not_finite(series: list[Series]) -> str:
    notes = []
    for one in series:
        steps = [step for step, value in zip(one.steps, one.values, strict=True) if not math.isfinite(value)]
        if steps and (one.kind == "raw" or not any(other.kind == "raw" for other in series)):
            where = ", ".join(f"{step:,.0f}" for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
            values = "1 value is" if len(steps) == 1 else f"{len(steps):,} values are"
            notes.append(f"{one.label}: {values} NaN or infinite, at step {where}.")
    return " ".join(notes)


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
    found: dict[str, Column] = {}
    for line in lines:
        step = line["step"]
        for key, value in line.items():
            if key == "step" or not isinstance(value, (int, float)):
                continue
            column = found.get(key)
            if column is None:
                column = found[key] = Column()
            column.steps.append(step)
            column.values.append(value)
    return found


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
