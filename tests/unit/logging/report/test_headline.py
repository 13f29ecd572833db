"""The numbers at the top of the report."""

import math

from mimo_train.layout.run import resolve
from mimo_train.logging.report.charts import columns
from mimo_train.logging.report.run_summary import Number, headline, run_charts
from tests.unit.configs import load


def test_only_what_was_measured_is_a_number():
    assert headline({}, 10) == []
    data = columns([{"step": 10, "consumed_samples": 320}])
    assert headline(data, 10) == [Number("Steps", "10", ""), Number("Samples", "320", "seen in training")]


def test_the_last_finite_evaluation_counts():
    lines = [{"step": 5, "eval/loss": 0.5}, {"step": 10, "eval/loss": math.nan}]
    assert headline(columns(lines), 10) == [Number("Held-out loss", "0.5000", "step 5")]


def test_of_sets_that_were_changed_the_newest_stands_at_the_top_and_the_test_set_below():
    old = {"step": 5, "eval/loss": 0.5, "eval/samples": 8}
    new = {"step": 9, "eval/charts/loss": 0.25, "eval/charts/samples": 4, "test/loss": 0.75, "test/samples": 2}
    assert headline(columns([old, new]), 9) == [
        Number("Held-out loss", "0.2500", "charts, 4 samples, step 9"),
        Number("Test loss", "0.7500", "test, 2 samples, step 9"),
    ]


def test_large_counts_are_short():
    written = []
    for samples in (9_999_999, 20_480_000, 4_096_000_000):
        data = columns([{"step": 1, "consumed_samples": samples}])
        written.append(headline(data, 1)[1].value)
    assert written == ["9,999,999", "20.5 M", "4.1 B"]


def test_sets_with_names_are_measured_too_and_the_first_stands_at_the_top():
    line = {"step": 5, "consumed_samples": 40}
    for name, match in (("a", 0.25), ("b", 0.5)):
        line |= {f"eval/{name}/loss": 1.5, f"eval/{name}/exact_match": match, f"eval/{name}/samples": 4}
    data = columns([line])
    found = [(one.label, one.value, one.detail) for one in headline(data, 5)[:2]]
    assert found == [
        ("Held-out exact match", "25.0%", "a, 4 samples, step 5"),
        ("Held-out loss", "1.5000", "a, 4 samples, step 5"),
    ]
    (chart,) = [
        one for one in run_charts(data, resolve(load("vlm_digits")).layout) if one.title == "Held-out exact match"
    ]
    assert [one.label for one in chart.curves] == ["a", "b"]
