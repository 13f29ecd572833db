"""The geometry of charts, and the figures that the template makes of it."""

import math
import random

import pytest

from mimo_train.logging.report.charts import (
    Series,
    chart,
    smooth,
    thin,
    value_axis,
)
from mimo_train.logging.report.page import environment
from tests.unit.logging.report.parsed_page import ParsedPage


def test_an_axis_is_logarithmic_for_two_decades_or_a_spike():
    assert not value_axis([1, 50], [1, 50]).log
    assert value_axis([0.001, 5], [0.001, 5]).log
    assert value_axis([1, 900, 1], [1, 2, 1]).log
    assert not value_axis([0, 900, 1], [0, 2, 1]).log
    axis = value_axis([0.001, 5], [0.001, 5])
    assert axis.place(1e-3) == 0 and axis.place(10) == pytest.approx(1) and axis.place(0.1) == pytest.approx(0.5)


def figure(drawn) -> str:
    """The HTML of a chart."""
    return environment().get_template("chart.html.j2").module.chart_figure(drawn)


def test_a_chart_names_what_it_shows_in_words():
    drawn = chart("Loss <1>", "nats", [Series("held-out", [1, 5], [2.0, 1.0], "dots")], last_step=5)
    html = figure(drawn)
    assert "Loss &lt;1&gt;" in html and "<1>" not in html
    assert drawn.summary == "Loss <1>. held-out: 2 at step 1, 1 at step 5, lowest 1, highest 2."
    assert ParsedPage(html).all("div", "plot")[0]["aria-label"] == drawn.summary
    assert html.count('class="dot') == 3, "the legend's too"


def test_a_curve_is_broken_at_gaps_and_a_point_alone_is_a_dot():
    drawn = chart("a", "b", [Series("c", [0, 1, 2, 4], [1.0, 0.0, math.nan, 0.5])], last_step=4, y_range=(0, 1))
    (curve,) = drawn.curves
    assert curve.path == "M0.0 0.0L250.0 1000.0M1000.0 500.0"
    assert [(dot.place, dot.title) for dot in curve.dots] == [("1000.0 500.0", "c, step 4: 0.5")]
    assert drawn.x_ticks[:2] == [("0", "0.00"), ("1", "25.00")]
    assert (drawn.y_ticks[0][1], drawn.y_ticks[-1][1]) == ("100.00", "0.00")


def test_a_chart_without_a_finite_value_is_none_and_gaps_are_noted():
    assert chart("Loss", "nats", [Series("a", [1], [math.nan])], last_step=1) is None
    assert chart("Loss", "nats", [], last_step=1) is None
    drawn = chart("Loss", "nats", [Series("a", [1, 2, 3], [1.0, math.nan, math.inf])], last_step=3)
    html = figure(drawn)
    assert "NaN or infinite at step 2, 3." in html and "nan" not in html.split('d="', 1)[1]


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
