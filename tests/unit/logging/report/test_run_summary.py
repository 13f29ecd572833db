"""The headline and the evaluation table of the report."""

import math

from mimo_train.layout.run import resolve
from mimo_train.logging.report.charts import columns
from mimo_train.logging.report.run_summary import Number, evaluation_table, headline, run_charts
from tests.unit.configs import load


def test_the_last_finite_evaluation_counts():
    lines = [{"step": 5, "eval/loss": 0.5}, {"step": 10, "eval/loss": math.nan}]
    assert headline(columns(lines), 10) == [Number("Held-out loss", "0.5000", "step 5")]


def test_of_sets_that_were_changed_the_newest_stands_at_the_top_and_the_test_set_below():
    old = {"step": 5, "eval/loss": 0.5, "eval/samples": 8}
    new = {"step": 9, "eval/charts/loss": 0.25, "eval/charts/samples": 4, "test/loss": 0.75, "test/samples": 2}
    assert headline(columns([old, new]), 9) == [
        Number("Held-out loss", "0.2500", "charts, 4 samples, step 9"),
        Number("Test loss", "0.7500", "2 samples, step 9"),
    ]


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
    assert [one.series.label for one in chart.curves] == ["a", "b"]


def test_a_missing_value_of_the_table_is_empty():
    lines = [
        {"step": 1000, "eval/loss": 2.5, "eval/exact_match": 0.125, "eval/samples": 512, "eval/tiny": 1e-5},
        {"step": 2000, "eval/loss": 0.4444444, "eval/exact_match": math.nan, "eval/perplexity": 61.44},
        {"step": 3000, "eval/loss": math.inf, "eval/samples": 1512, "lm loss": 1.0},
    ]
    table = evaluation_table(columns(lines))
    assert table.names == ["loss", "exact match", "samples", "tiny", "perplexity"]
    assert table.rows == [
        ("1,000", ["2.5", "12.5%", "512", "1e-05", ""]),
        ("2,000", ["0.44444", "nan", "", "", "61.44"]),
        ("3,000", ["inf", "", "1,512", "", ""]),
    ]
    assert table.evaluations == 3
