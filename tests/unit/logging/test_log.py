import logging

import pytest

from mimo_train.config import schema_log
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import TRACKERS, LogConfig
from mimo_train.layout.run import config_faults
from mimo_train.logging import metrics_log as log_module
from mimo_train.logging.metrics_log import SINKS, MetricsLog, SinkKind, build_metrics_log
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.unit.configs import changed


class Recorder:
    def __init__(self, fail_log=False, fail_close=False):
        self.fail_log, self.fail_close = fail_log, fail_close
        self.calls, self.closed = [], 0

    def log(self, step, consumed_samples, values):
        self.calls.append((step, consumed_samples, values))
        if self.fail_log:
            raise ConnectionError("no route")

    def close(self):
        self.closed += 1
        if self.fail_close:
            raise OSError("disk full")


def test_every_sink_gets_every_call():
    one, two = Recorder(), Recorder()
    log = MetricsLog({"metrics.jsonl": one, "wandb": two})
    log.log(1, 32, {"lm loss": 1.0})
    log.log(1, 32, {"eval/loss": 2.0})
    assert one.calls == two.calls == [(1, 32, {"lm loss": 1.0}), (1, 32, {"eval/loss": 2.0})]
    log.close()
    assert (one.closed, two.closed) == (1, 1)
    log.close()
    assert (one.closed, two.closed) == (1, 1)


def test_a_failing_copy_is_reported_once_and_the_others_go_on(caplog):
    good, bad = Recorder(), Recorder(fail_log=True)
    log = MetricsLog({"wandb": bad, "metrics.jsonl": good})
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            log.log(step, step, {})
        log.close()
    assert len(good.calls) == 5 and len(bad.calls) == 1 and bad.closed == 1
    (record,) = caplog.records
    assert "wandb" in record.getMessage() and "no route" in record.getMessage()


def test_a_failing_record_is_an_error():
    log = MetricsLog({"metrics.jsonl": Recorder(fail_log=True)})
    with pytest.raises(ConnectionError):
        log.log(1, 1, {})


def test_close_closes_every_sink_and_then_raises_for_the_record(caplog):
    first, second, third = Recorder(fail_close=True), Recorder(fail_close=True), Recorder()
    log = MetricsLog({"metrics.jsonl": first, "tensorboard": second, "wandb": third})
    with pytest.raises(OSError, match="disk full"):
        log.close()
    assert (first.closed, second.closed, third.closed) == (1, 1, 1)
    assert "tensorboard" in caplog.text


@pytest.mark.parametrize(
    ("tensorboard", "trackers", "expected"),
    [
        (False, False, {"metrics.jsonl"}),
        (True, False, {"metrics.jsonl", "tensorboard"}),
        (True, True, {"metrics.jsonl", "tensorboard", "wandb", "mlflow", "comet"}),
    ],
)
def test_the_config_picks_the_sinks(tmp_path, monkeypatch, tensorboard, trackers, expected):
    opened = {}
    kinds = {
        name: SinkKind(
            kind.wanted,
            lambda cfg, run_dir, resumed_step, name=name: opened.setdefault(name, Recorder()),
            kind.required,
        )
        for name, kind in SINKS.items()
    }
    monkeypatch.setattr(log_module, "SINKS", kinds)
    cfg = ConfigContainer(
        log=LogConfig(report_to=["tensorboard"] * tensorboard + ["wandb", "mlflow", "comet"] * trackers)
    )
    build_metrics_log(cfg, tmp_path / "run", resumed_step=0).log(1, 32, {})
    assert set(opened) == expected
    assert all(len(sink.calls) == 1 for sink in opened.values())


def test_a_copy_that_cannot_start_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def refuse(cfg, run_dir, resumed_step):
        raise ConnectionError("no route")

    monkeypatch.setitem(log_module.SINKS, "wandb", SinkKind(lambda cfg: "wandb" in cfg.log.report_to, refuse))
    cfg = ConfigContainer(log=LogConfig(report_to=["wandb"]))
    log = build_metrics_log(cfg, tmp_path / "run", resumed_step=0)
    log.log(1, 32, {"lm loss": 1.5})
    log.close()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "consumed_samples": 32, "lm loss": 1.5}]
    assert "wandb cannot start" in caplog.text


def test_a_record_that_cannot_be_opened_stops_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError):
        build_metrics_log(ConfigContainer(log=LogConfig(report_to=[])), tmp_path, resumed_step=0)


def test_a_sink_is_found_by_name_as_long_as_it_works():
    good, bad = Recorder(), Recorder(fail_log=True)
    log = MetricsLog({"metrics.jsonl": good, "wandb": bad})
    assert log.sink("metrics.jsonl") is good and log.sink("wandb") is bad and log.sink("comet") is None
    log.log(1, 1, {})
    assert log.sink("wandb") is None


@pytest.mark.parametrize("name", TRACKERS)
def test_a_sink_without_its_library_is_refused_before_the_start(tmp_path, monkeypatch, name):
    key = "log.report_to"
    cfg = changed({key: [name]})
    module, install = TRACKERS[name]
    pytest.importorskip(module)
    assert not [fault for fault in config_faults(cfg) if fault.key == key]
    monkeypatch.setattr(schema_log, "is_installed", lambda name: False)
    (fault,) = [fault for fault in config_faults(cfg) if fault.key == key]
    assert (
        module in fault.message and f"pip install {install}" in fault.message and f"or remove {name}" in fault.message
    )


def test_a_folder_of_the_name_of_a_library_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, "comet", ("no_such_library", "it"))
    assert "log.report_to" in [fault.key for fault in config_faults(changed({"log.report_to": ["comet"]}))]
