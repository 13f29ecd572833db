"""Prometheus' own parsers read the newest numbers of a run, from its file and from its endpoint."""

import logging
import math
import socket
import urllib.request

import pytest

from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import LogConfig
from mimo_train.metrics.metrics_log import build_metrics_log
from mimo_train.metrics.sinks.prometheus import FILE, gauge_of

pytest.importorskip("prometheus_client")

VALUES = {
    "lm loss": 2.5,
    "tflops": 3.0,
    "tflops/images": 1.0,
    "learning_rate/images": 1e-3 / 3,
    "learning_rate/images.projector": 0.5,
    "time/images/bridge_wait": 0.25,
    "time/total": 7.0,
    "grad_norm": math.nan,
    "loss/web": 1.5,
}
EVALUATED = {"eval/loss": 4.0, "eval/charts/loss": 5.0}
GAUGES = {
    ("mimo_train_step",): 2.0,
    ("mimo_train_consumed_samples",): 64.0,
    ("mimo_train_lm_loss",): 2.5,
    ("mimo_train_tflops", ("module", "")): 3.0,
    ("mimo_train_tflops", ("module", "images")): 1.0,
    ("mimo_train_learning_rate", ("module", "images")): 1e-3 / 3,
    ("mimo_train_learning_rate", ("module", "images.projector")): 0.5,
    ("mimo_train_module_seconds", ("module", "images"), ("part", "bridge_wait")): 0.25,
    ("mimo_train_time_total",): 7.0,
    ("mimo_train_grad_norm",): math.nan,
    ("mimo_train_source_loss", ("source", "web")): 1.5,
    ("mimo_train_eval_loss", ("set", "")): 4.0,
    ("mimo_train_eval_loss", ("set", "charts")): 5.0,
}


def opened(run_dir, port: int = 0):
    log = build_metrics_log(
        ConfigContainer(log=LogConfig(tensorboard=False, prometheus=True, prometheus_port=port)), run_dir,
        resumed_step=0,
    )  # fmt: skip
    log.log(1, 32, {"lm loss": 9.0})
    log.log(2, 64, VALUES)
    log.log(2, 64, EVALUATED)
    return log


def gauges(text: str, parse) -> dict[tuple, float]:
    """What a parser of Prometheus reads, without the time and the run's name, which must be there."""
    found = {}
    for sample in (sample for family in parse(text) for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("run") == "my run"
        found[sample.name, *sorted(labels.items())] = sample.value
    assert found.pop(("mimo_train_logged_timestamp_seconds",)) > 1e9
    return found


def test_the_file_has_the_newest_numbers(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    run_dir = tmp_path / "my run"
    opened(run_dir).close()
    text = (run_dir / FILE).read_text()
    assert gauges(text, text_string_to_metric_families) == pytest.approx(GAUGES, nan_ok=True, rel=0, abs=0)
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(FILE)] == [FILE]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def test_the_endpoint_answers_until_the_run_ends(tmp_path):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    port = free_port()
    log = opened(tmp_path / "my run", port)
    url = urllib.request.Request(
        f"http://localhost:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        text = answer.read().decode()
    assert gauges(text, text_string_to_metric_families) == pytest.approx(GAUGES, nan_ok=True, rel=0, abs=0)
    log.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=30)


def test_a_port_in_use_is_reported_and_training_goes_on(tmp_path, caplog):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with caplog.at_level(logging.WARNING):
            opened(tmp_path, taken.getsockname()[1]).close()
    assert "prometheus cannot start" in caplog.text and not (tmp_path / FILE).exists()
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_port_without_the_sink_is_a_fault():
    (fault,) = LogConfig(prometheus_port=9400).faults(experts=0)
    assert fault.key == "log.prometheus_port"


@pytest.mark.parametrize("key", ["moe/load_balancing_loss_layer_3", "throughput/device/tokens_per_sec", "lm loß-1"])
def test_other_keys_are_names(key):
    name, labels = gauge_of(key)
    assert name.startswith("mimo_train_") and name.isascii() and name.isidentifier() and not labels
