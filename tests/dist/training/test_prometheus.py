"""A run of several modules leaves its newest numbers for Prometheus."""

from pathlib import Path

import pytest

from tests.dist.runs import config, train_on_ranks

pytest.importorskip("prometheus_client")


def test_the_numbers_are_those_of_the_last_line(digits, tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    from mimo_train.metrics.sinks.prometheus import gauge_of

    options = ("layout=two_processes", "train.iters=3", "log.prometheus=true")
    last = train_on_ranks(config("vlm_digits", tmp_path, digits, *options))[-1]
    assert last["step"] == 3 and {"time/images/compute", "time/language/bridge_wait"} <= set(last)
    families = text_string_to_metric_families(Path(tmp_path, "metrics.prom").read_text())
    found = {
        (sample.name, frozenset(sample.labels.items()) - {("run", tmp_path.name)}): sample.value
        for family in families
        for sample in family.samples
    }
    for key, value in last.items():
        name, labels = gauge_of(key)
        values = [one for (of, said), one in found.items() if of == name and set(labels.items()) <= said]
        assert float(value) in values, key
