"""The geometry of charts, and the figures that the template makes of it."""

import math

import pytest

from mimo_train.logging.report.charts import (
    Axis,
    Series,
    chart,
    linear_axis,
    number_format,
    short_count,
    smooth,
    value_axis,
)
from mimo_train.logging.report.page import environment
from tests.unit.logging.report.parsed_page import ParsedPage


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.5, 1]), (0, 8, [0, 2, 4, 6, 8]), (8100, 9900, [8000, 8500, 9000, 9500, 10000])],
)
def test_linear_ticks_are_round_and_cover_the_range(low, high, ticks):
    axis = linear_axis(low, high, 5)
    assert axis.ticks == pytest.approx(ticks) and axis.low <= low and axis.high >= high
    assert axis.place(axis.low) == 0 and axis.place(axis.high) == 1


def test_an_axis_is_logarithmic_for_two_decades_or_a_spike():
    assert not value_axis([1, 50], [1, 50]).log
    assert value_axis([0.001, 5], [0.001, 5]).log
    assert value_axis([1, 900, 1], [1, 2, 1]).log
    assert not value_axis([0, 900, 1], [0, 2, 1]).log
    axis = value_axis([0.001, 5], [0.001, 5])
    assert axis.place(1e-3) == 0 and axis.place(10) == pytest.approx(1) and axis.place(0.1) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-7])
def test_one_value_gets_an_axis_around_it(value):
    axis = value_axis([value], [value])
    assert axis.low <= value <= axis.high and axis.low < axis.high


def test_numbers_are_written_as_their_ticks_need():
    assert [number_format(linear_axis(0, 0.3, 5))(value) for value in (0.0, 0.1)] == ["0.0", "0.1"]
    assert number_format(linear_axis(0, 1e-3, 5))(5e-4) == "5e-4"
    assert number_format(Axis(1e-3, 1, True, [1e-3, 1e-2, 0.1, 1]))(1e-3) == "1e-3"
    assert [short_count(step) for step in (0, 800, 5000, 20_000, 1_500_000)] == ["0", "800", "5,000", "20k", "1.5M"]


def test_large_ticks_are_in_thousands_or_millions():
    assert [number_format(linear_axis(0, 6e5, 4))(value) for value in (0.0, 2e5)] == ["0", "200k"]
    assert number_format(linear_axis(0, 3e6, 4))(1e6) == "1M"
    assert number_format(linear_axis(0, 3e9, 4))(1e9) == "1e9"


@pytest.mark.parametrize("value", [0.1, 1.2, 9213.7, -3e-5])
def test_the_rounding_of_a_smoothed_constant_is_no_curve(value):
    values = [value] * 500
    axis = value_axis([*values, *smooth(values, 10)], smooth(values, 10))
    assert axis.high - axis.low > abs(value) / 2


def figure(drawn) -> str:
    """The HTML of a chart."""
    return environment().get_template("chart.html.j2").module.chart_figure(drawn)


def test_a_chart_names_what_it_shows_in_words():
    drawn = chart("Loss <1>", "nats", [Series("held-out", [1, 5], [2.0, 1.0], "dots")], last_step=5)
    html = figure(drawn)
    assert "Loss &lt;1&gt;" in html and "<1>" not in html
    assert drawn.summary == "Loss <1>. held-out: 2 at step 1, 1 at step 5, lowest 1, highest 2."
    assert ParsedPage(html).all("div", "plot")[0]["aria-label"] == drawn.summary
    assert html.count('class="dot') == 2


def test_large_values_are_whole_numbers_in_words():
    assert "412,346 at step 1," in chart("a", "b", [Series("c", [1], [412_345.6])], last_step=5).summary


def test_a_curve_is_broken_at_gaps_and_a_point_alone_is_a_dot():
    drawn = chart("a", "b", [Series("c", [0, 1, 2, 4], [1.0, 0.0, math.nan, 0.5])], last_step=4, y_range=(0, 1))
    (curve,) = drawn.curves
    assert curve.path == "M0.0 0.0L250.0 1000.0M1000.0 500.0"
    assert [(dot.place, dot.title) for dot in curve.dots] == [("1000.0 500.0", "c, step 4: 0.5")]
    assert [(tick.label, tick.percent) for tick in drawn.x_ticks][:2] == [("0", "0.00"), ("1", "25.00")]
    assert (drawn.y_ticks[0].percent, drawn.y_ticks[-1].percent) == ("100.00", "0.00")
    assert not drawn.has_legend and figure(drawn).count("<li>") == 0


def test_a_chart_without_a_finite_value_is_none_and_gaps_are_noted():
    assert chart("Loss", "nats", [Series("a", [1], [math.nan])], last_step=1) is None
    assert chart("Loss", "nats", [], last_step=1) is None
    drawn = chart("Loss", "nats", [Series("a", [1, 2, 3], [1.0, math.nan, math.inf])], last_step=3)
    html = figure(drawn)
    assert "2 values are NaN or infinite, at step 2, 3." in html and "nan" not in html.split('d="', 1)[1]
