"""The table of evaluations."""

import math

from mimo_train.logging.report.charts import columns
from mimo_train.logging.report.run_summary import evaluation_table


def test_a_column_has_equally_many_decimals_and_a_missing_value_is_empty():
    lines = [
        {"step": 1000, "eval/loss": 2.5, "eval/exact_match": 0.125, "eval/samples": 512, "eval/tiny": 1e-5},
        {"step": 2000, "eval/loss": 0.4444444, "eval/exact_match": math.nan, "eval/perplexity": 61.44},
        {"step": 3000, "eval/loss": math.inf, "eval/samples": 1512, "lm loss": 1.0},
    ]
    table = evaluation_table(columns(lines))
    assert table.names == ["loss", "exact match", "samples", "tiny", "perplexity"]
    assert table.rows == [
        ("1,000", ["2.5000", "12.5%", "512", "1e-05", ""]),
        ("2,000", ["0.4444", "nan", "", "", "61.440"]),
        ("3,000", ["inf", "", "1,512", "", ""]),
    ]
    assert table.evaluations == 3


def test_there_is_no_table_without_evaluations():
    assert evaluation_table(columns([{"step": 1, "lm loss": 1.0}])) is None


def test_only_the_last_evaluations_are_rows():
    table = evaluation_table(columns({"step": step, "eval/loss": 1.0} for step in range(1, 121)))
    assert (len(table.rows), table.rows[-1][0], table.evaluations) == (50, "120", 120)
