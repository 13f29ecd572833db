"""From the lines of metrics.jsonl to the points of a curve: columns, smoothing, thinning."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Column:
    """The values of one key, with the steps that have one."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))

    def last_finite(self) -> tuple[float, float] | None:
        """(step, value) of the last value that is a number, if any."""
        pairs = zip(reversed(self.steps), reversed(self.values), strict=True)
        return next(((step, value) for step, value in pairs if math.isfinite(value)), None)


def columns(lines: Iterable[dict[str, float]]) -> dict[str, Column]:
    """The lines by key. Takes them one at a time, so that a long run needs 16 bytes a number."""
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
    """A moving average over about `window` values that does not lag; NaN and infinities are skipped and stay gaps.

    Weights fall off exponentially on both sides: an average of the past alone trails behind a curve that falls.
    """
    before, after = _decaying_sums(values, window), reversed(_decaying_sums(values[::-1], window))
    return [
        (total + other) / (weight + more) if math.isfinite(value) else math.nan
        for value, (total, weight), (other, more) in zip(values, before, after, strict=True)
    ]


def _decaying_sums(values: Sequence[float], window: float) -> list[tuple[float, float]]:
    """(sum, sum of weights) of the values so far, each weighing less with its distance."""
    keep = 1 - 1 / max(1.0, window)
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1
        sums.append((total, weight))
    return sums


def thin(steps: Sequence[float], values: Sequence[float], max_points: int = 1000) -> list[tuple[float, float | None]]:
    """At most about `max_points` points: of each bucket the lowest and the highest value, so that spikes stay visible.

    A bucket without a finite value becomes (step, None): a gap in the curve.
    """
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
