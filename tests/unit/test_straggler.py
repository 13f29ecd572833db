"""Slowest and fastest ranks of every module."""

import math

import numpy
import pytest

from mimo_train.diagnose.straggler import StragglerTimer
from mimo_train.plan.layout import plan
from tests.unit.configs import load


class Lines:
    """A console that keeps what it is told."""

    def __init__(self):
        self.said = []

    def message(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def layout():
    """images on ranks 0 and 1, language on 2 and 3."""
    return plan(load("vlm_digits", "layout=images_dp2_language_dp2"))


def test_every_module_has_its_own_slowest_rank(layout):
    console = Lines()
    timer = StragglerTimer(layout, console)
    matrix = numpy.array([[2.0, 9], [1.0, 9], [4.0, 9], [12.0, 9]])
    assert timer.observe(dict(enumerate(matrix[:, 0]))) == {
        "straggler/images/slowest_rank": 0,
        "straggler/images/slowest_over_median": pytest.approx(2 / 1.5),
        "straggler/language/slowest_rank": 3,
        "straggler/language/slowest_over_median": pytest.approx(12 / 8),
    }
    timer.report(38e12, 4)
    assert console.said == [
        "stragglers:  images rank 0 slowest (0.5 s/step, 1.33 of the median), rank 1 fastest (0.25 s/step);  "
        "language rank 3 slowest (3 s/step, 1.50 of the median), rank 2 fastest (1 s/step);  "
        "2 TFLOP/s per device while it computes"
    ]
    timer.report(38e12, 4)
    assert len(console.said) == 1, "times are reported once"


def test_modules_that_share_ranks_are_compared_over_the_same_ranks():
    layout = plan(load("vlm_digits", "layout=one_process"))
    values = StragglerTimer(layout, None).observe({0: 3.0})
    assert values["straggler/images/slowest_rank"] == values["straggler/language/slowest_rank"] == 0
    assert values["straggler/language/slowest_over_median"] == 1


def test_an_interval_without_computation_gives_no_number(layout):
    values = StragglerTimer(layout, None).observe(dict.fromkeys(range(4), 0.0))
    assert math.isnan(values["straggler/images/slowest_over_median"])


def test_ranks_that_do_not_log_report_nothing(layout):
    StragglerTimer(layout, None).report(1e12, 1)
