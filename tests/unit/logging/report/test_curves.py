"""From lines of metrics to points: columns, smoothing, thinning."""

import math
import random

import pytest

from mimo_train.logging.report.charts import columns, smooth, thin


def test_columns_keep_only_the_steps_that_have_a_value():
    lines = [{"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}, {"step": 2, "a": math.nan, "note": "text"}]
    found = columns(lines)
    assert set(found) == {"a", "b"}
    assert list(found["a"].steps) == [1, 2] and list(found["b"].values) == [2.0]
    assert found["a"].last_finite() == (1, 1.0)


def test_smoothing_keeps_a_constant_does_not_lag_and_skips_nan():
    assert smooth([3.0] * 50, 10) == pytest.approx([3.0] * 50)
    line = smooth([float(value) for value in range(201)], 10)
    assert line[100] == pytest.approx(100.0)
    values = smooth([1.0, math.nan, 1.0, math.inf, 1.0], 3)
    assert [math.isnan(value) for value in values] == [False, True, False, True, False]
    assert [value for value in values if not math.isnan(value)] == pytest.approx([1.0] * 3)
    assert smooth([], 10) == []


def test_thinning_bounds_the_points_and_keeps_every_extreme():
    generator = random.Random(0)
    values = [generator.gauss(0, 1) for _ in range(200_000)]
    values[123_456], values[77] = 50.0, -50.0
    points = thin(range(200_000), values)
    assert len(points) <= 1000
    assert (123_456, 50.0) in points and (77, -50.0) in points
    assert [step for step, _ in points] == sorted(step for step, _ in points)


def test_thinning_leaves_short_curves_alone_and_marks_gaps():
    assert thin([1, 2, 3], [1.0, math.nan, 3.0]) == [(1, 1.0), (2, None), (3, 3.0)]
    values = [1.0] * 4000 + [math.nan] * 4000
    assert (5000, None) in [(step // 1000 * 1000, value) for step, value in thin(range(8000), values)]
