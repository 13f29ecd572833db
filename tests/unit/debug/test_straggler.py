"""Slowest and fastest ranks of every module."""

import math

import numpy
import pytest

from mimo_train.debug.straggler import StragglerTimer
from mimo_train.layout.run import resolve
from tests.unit.configs import load


class Lines:
    """A console that keeps its messages."""

    def __init__(self):
        self.said = []

    def message(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def layout():
    """images on ranks 0 and 1, language on 2 and 3."""
    return resolve(load("vlm_digits", "layout=images_dp2_language_dp2")).layout


def test_every_module_has_its_own_slowest_rank(layout):
    console = Lines()
    timer = StragglerTimer(layout, console)
    matrix = numpy.array([[2.0, 9], [1.0, 9], [4.0, 9], [12.0, 9]])
    assert timer.observe(dict(enumerate(matrix[:, 0])), steps=4, flops=38e12) == {
        "straggler/images/slowest_rank": 0,
        "straggler/images/slowest_over_median": pytest.approx(2 / 1.5),
        "straggler/language/slowest_rank": 3,
        "straggler/language/slowest_over_median": pytest.approx(12 / 8),
    }
    with timer(bdata=True), timer:  # as a forward step that measures with Megatron-Core's detector
        pass
    timer.report()
    assert console.said == [
        "stragglers:  images rank 0 slowest (0.5 s/step, 1.33 of the median), rank 1 fastest (0.25 s/step);  "
        "language rank 3 slowest (3 s/step, 1.50 of the median), rank 2 fastest (1 s/step);  "
        "2 TFLOP/s per device while it computes"
    ]
    timer.report()
    assert len(console.said) == 1, "times are reported once"


def test_modules_that_share_ranks_are_compared_over_the_same_ranks():
    layout = resolve(load("vlm_digits", "layout=one_process")).layout
    values = StragglerTimer(layout, Lines()).observe({0: 3.0}, steps=1)
    assert values["straggler/images/slowest_rank"] == values["straggler/language/slowest_rank"] == 0
    assert values["straggler/language/slowest_over_median"] == 1


def test_an_interval_without_computation_gives_no_number(layout):
    values = StragglerTimer(layout, Lines()).observe(dict.fromkeys(range(4), 0.0), steps=1)
    assert math.isnan(values["straggler/images/slowest_over_median"])


def test_ranks_that_do_not_log_have_no_times_and_report_nothing(layout):
    console = Lines()
    StragglerTimer(layout, console).report()
    assert console.said == []


def test_seconds_of_a_step_are_those_of_the_interval_that_was_observed(layout):
    """Also of a partial one: the last of a run, or the first after a resume."""
    console = Lines()
    timer = StragglerTimer(layout, console)
    for seconds, steps, said in ((8.0, 4, "2 s/step"), (6.0, 2, "3 s/step")):
        timer.observe(dict.fromkeys(range(4), seconds), steps)
        timer.report()
        assert console.said[-1].count(said) == 4 and "TFLOP" not in console.said[-1]
