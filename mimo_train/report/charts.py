"""Line charts as HTML: an SVG that stretches with the page, and labels as text that does not. Imports no torch.

The drawing has a fixed box of 1000 x 1000 that fills whatever room there is; strokes do not scale with it. Labels are
placed by percentages, so they keep their size on a phone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from mimo_train.report.curves import thin

_BOX = 1000
_MAX_DOTS = 100
"""Points that are drawn as dots; with more of them the line alone is clearer."""


@dataclass(frozen=True)
class Series:
    """One curve: `kind` is raw (thin and pale), line, or dots (points joined by a dashed line); `color` is 0 to 5."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    kind: str = "line"
    color: int = 0


@dataclass(frozen=True)
class Axis:
    """A range, whether it is logarithmic, and where its ticks are."""

    low: float
    high: float
    log: bool
    ticks: list[float]

    def place(self, value: float) -> float:
        """Where `value` lies: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def chart(
    title: str,
    y_label: str,
    series: list[Series],
    *,
    last_step: float,
    y_range: tuple[float, float] | None = None,
    y_format: Callable[[float], str] | None = None,
    name_single: bool = False,
) -> str:
    """A figure with title, legend, axes and curves over steps 0 to `last_step`; empty when there is nothing to draw.

    One curve alone has no legend, the title names it, unless `name_single`.
    """
    drawn = [(one, thin(one.steps, one.values)) for one in series]
    values = [value for _, points in drawn for _, value in points if value is not None]
    if not values:
        return ""
    x_axis = linear_axis(0, max(1.0, last_step), 6, whole=True)
    x_axis = Axis(0, max(1.0, last_step), False, [tick for tick in x_axis.ticks if tick <= last_step])
    main = [value for one, points in drawn for _, value in points if value is not None and one.kind != "raw"]
    y_axis = linear_axis(*y_range, 6) if y_range else value_axis(values, main or values)
    name = y_format or number_format(y_axis)
    exact = y_format or (lambda value: f"{value:.4g}")
    paths = "".join(_curve(one, points, x_axis, y_axis, exact) for one, points in drawn)
    legend = _legend(series) if len(series) > 1 or name_single else ""
    scale = " (log scale)" if y_axis.log else ""
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>'
        f'<p class="axis-name">{escape(y_label)}{scale}</p>'
        f'<div class="plot" role="img" aria-label="{escape(_summary(title, series, exact))}">'
        f'<svg viewBox="0 0 {_BOX} {_BOX}" preserveAspectRatio="none" aria-hidden="true">{_grid(y_axis)}{paths}</svg>'
        f"{_y_labels(y_axis, name)}{_x_labels(x_axis)}</div>{_not_finite(series)}</figure>"
    )


def value_axis(values: Sequence[float], main: Sequence[float]) -> Axis:
    """The axis that shows all `values`, of which `main` are not noise.

    Logarithmic when the main values span two decades, or when a spike would press them flat.
    """
    low, high = min(values), max(values)
    if low > 0 and (max(main) > 100 * min(main) or high > 20 * max(main)):
        return _log_axis(low, high)
    if low == high:
        low, high = (0.0, 1.25 * high or 1.0) if low >= 0 else (1.25 * low, 0.0)
    if 0 < low < 0.4 * high:
        low = 0.0
    return linear_axis(low, high, 5)


def linear_axis(low: float, high: float, count: int, whole: bool = False) -> Axis:
    """An axis that ends on ticks at round distances (1, 2 or 5 times a power of ten), about `count` of them."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], False, ticks)


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    ticks = [10.0**exponent for exponent in range(first, last + 1, every)]
    return Axis(10.0**first, 10.0**last, True, ticks)


def number_format(axis: Axis) -> Callable[[float], str]:
    """How the numbers of an axis are written: with the decimals that its ticks need, or as powers of ten."""
    largest = max(abs(axis.low), abs(axis.high))
    if axis.log or largest >= 1e5 or largest < 1e-2:
        return _short
    step = axis.ticks[1] - axis.ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return lambda value: f"{value:,.{decimals}f}"


def _short(value: float) -> str:
    """Two significant digits: 0.02, 3e-4, 1.5e6."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def step_format(step: float) -> str:
    """A number of steps in short: 800, 5,000, 20k, 1.5M."""
    if step >= 1e6:
        return f"{step / 1e6:g}M"
    return f"{step / 1e3:g}k" if step >= 1e4 else f"{step:,.0f}"


def _curve(
    one: Series, points: list[tuple[float, float | None]], x_axis: Axis, y_axis: Axis, name: Callable[[float], str]
) -> str:
    """The curve, broken at gaps; dots on its points (kind dots), and on a point alone between gaps."""
    segments: list[list[tuple[str, str]]] = [[]]
    for step, value in points:
        if value is None:
            segments.append([])
            continue
        place = f"{_BOX * x_axis.place(step):.1f} {_BOX * (1 - y_axis.place(value)):.1f}"
        segments[-1].append((place, f"{one.label}, step {step:,.0f}: {name(value)}"))
    path = "".join("M" + "L".join(place for place, _ in segment) for segment in segments if segment)
    every = one.kind == "dots" and len(points) <= _MAX_DOTS
    # A dot is a line of no length with round ends: unlike a circle it stays round when the box is stretched.
    dots = "".join(
        f'<path class="dot c{one.color}" d="M{place}h0"><title>{escape(title)}</title></path>'
        for segment in segments
        if every or len(segment) == 1
        for place, title in segment
    )
    return f'<path class="curve {one.kind} c{one.color}" d="{path}"/>{dots}'


def _grid(axis: Axis) -> str:
    lines = "".join(f"M0 {_BOX * (1 - axis.place(tick)):.1f}h{_BOX}" for tick in axis.ticks[1:])
    return f'<path class="grid" d="{lines}"/><path class="base" d="M0 {_BOX}h{_BOX}"/>'


def _y_labels(axis: Axis, name: Callable[[float], str]) -> str:
    return "".join(
        f'<span class="y" style="top:{100 * (1 - axis.place(tick)):.2f}%">{escape(name(tick))}</span>'
        for tick in axis.ticks
    )


def _x_labels(axis: Axis) -> str:
    many = len(axis.ticks) > 4
    labels = "".join(
        f'<span class="x{" odd" if index % 2 and many else ""}" style="left:{100 * axis.place(tick):.2f}%">'
        f"{step_format(tick)}</span>"
        for index, tick in enumerate(axis.ticks)
    )
    return labels + '<span class="x-name">step</span>'


def _legend(series: list[Series]) -> str:
    """A key for each curve."""
    keys = []
    for one in series:
        dot = f'<path class="dot c{one.color}" d="M12 5h0"/>' if one.kind == "dots" else ""
        line = f'<path class="curve {one.kind} c{one.color}" d="M1 5H23"/>'
        keys.append(f'<li><svg width="24" height="10" aria-hidden="true">{line}{dot}</svg>{escape(one.label)}</li>')
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _summary(title: str, series: list[Series], name: Callable[[float], str]) -> str:
    """The chart in words, for those who cannot see it."""
    sentences = []
    for one in series:
        finite = [(step, value) for step, value in zip(one.steps, one.values, strict=True) if math.isfinite(value)]
        if finite and one.kind != "raw":
            (start, first), (end, last) = finite[0], finite[-1]
            low, high = min(value for _, value in finite), max(value for _, value in finite)
            sentences.append(
                f"{one.label}: {name(first)} at step {start:.0f}, {name(last)} at step {end:.0f}, "
                f"lowest {name(low)}, highest {name(high)}."
            )
    return " ".join([f"{title}.", *sentences])


def _not_finite(series: list[Series]) -> str:
    """A note about values that cannot be drawn."""
    notes = []
    for one in series:
        steps = [step for step, value in zip(one.steps, one.values, strict=True) if not math.isfinite(value)]
        if steps and (one.kind == "raw" or not any(other.kind == "raw" for other in series)):
            where = ", ".join(f"{step:,.0f}" for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
            values = "1 value is" if len(steps) == 1 else f"{len(steps):,} values are"
            notes.append(f"{one.label}: {values} NaN or infinite, at step {where}.")
    return f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""
