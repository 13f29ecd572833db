"""The numbers at the top of the report."""

import math

from mimo_train.report.curves import columns
from mimo_train.report.headline import Number, headline


def test_only_what_was_measured_is_a_number():
    assert headline({}, 10) == []
    data = columns([{"step": 10, "consumed_samples": 320}])
    assert headline(data, 10) == [Number("Steps", "10", ""), Number("Samples", "320", "seen in training")]


def test_the_last_finite_evaluation_counts():
    lines = [{"step": 5, "eval/loss": 0.5}, {"step": 10, "eval/loss": math.nan}]
    assert headline(columns(lines), 10) == [Number("Held-out loss", "0.5000", "step 5")]


def test_large_counts_are_short():
    written = []
    for samples in (9_999_999, 20_480_000, 4_096_000_000):
        data = columns([{"step": 1, "consumed_samples": samples}])
        written.append(headline(data, 1)[1].value)
    assert written == ["9,999,999", "20.5 M", "4.1 B"]
