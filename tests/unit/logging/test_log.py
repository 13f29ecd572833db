"""The log and its sinks; a disk that is full, a folder that is removed, a reader that has gone end no run."""

import errno
import logging
import os
import shutil

import pytest

from mimo_train.config import schema_log
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import TRACKERS, LogConfig
from mimo_train.evaluation import predictions
from mimo_train.layout.run import config_faults
from mimo_train.logging import metrics_log as log_module
from mimo_train.logging import progress
from mimo_train.logging.metrics_log import MetricsLog, build_metrics_log
from mimo_train.logging.sinks import jsonl
from mimo_train.logging.sinks.jsonl import JsonlSink, read_metrics
from tests.unit.configs import changed


class Recorder:
    handle = "recorder"

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


def test_a_failing_copy_is_reported_once_and_the_others_go_on(caplog):
    good, bad = Recorder(), Recorder(fail_log=True)
    log = MetricsLog({"wandb": bad, "metrics.jsonl": good})
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            log.log(step, step, {})
        assert log.handle("wandb") is log.handle("comet") is None and log.handle("metrics.jsonl") == "recorder"
        log.close()
    assert len(good.calls) == 5 and len(bad.calls) == 1 and bad.closed == 1
    (record,) = caplog.records
    assert "wandb" in record.getMessage() and "no route" in record.getMessage()


def test_close_closes_every_sink_and_then_raises_for_the_record(caplog):
    first, second, third = Recorder(fail_close=True), Recorder(fail_close=True), Recorder()
    log = MetricsLog({"metrics.jsonl": first, "tensorboard": second, "wandb": third})
    with pytest.raises(OSError, match="disk full"):
        log.close()
    assert (first.closed, second.closed, third.closed) == (1, 1, 1)
    assert "tensorboard" in caplog.text


def test_a_copy_that_cannot_start_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def refuse(run_dir, config, resumed_step):
        raise ConnectionError("no route")

    monkeypatch.setitem(log_module.SINKS, "wandb", refuse)
    cfg = ConfigContainer(log=LogConfig(tensorboard=False, wandb=True))
    log = build_metrics_log(cfg, tmp_path / "run", resumed_step=0)
    log.log(1, 32, {"lm loss": 1.5})
    log.close()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "consumed_samples": 32, "lm loss": 1.5}]
    assert "wandb cannot start" in caplog.text


def test_a_record_that_cannot_be_opened_stops_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError):
        build_metrics_log(ConfigContainer(log=LogConfig(tensorboard=False)), tmp_path, resumed_step=0)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_sink_without_its_library_is_refused_before_the_start(tmp_path, monkeypatch, name):
    key = f"log.{name}"
    cfg = changed({key: True})
    module, install = TRACKERS[name]
    pytest.importorskip(module)
    assert not [fault for fault in config_faults(cfg) if fault.key == key]
    monkeypatch.setattr(schema_log, "is_installed", lambda name: False)
    (fault,) = [fault for fault in config_faults(cfg) if fault.key == key]
    assert module in fault.message and f"pip install {install}" in fault.message


class Full:
    """Stands for `os`: takes some bytes, then none until there is room again."""

    def __init__(self, room: int):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(file, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_lines_are_held_back_while_the_disk_is_full(room, tmp_path, monkeypatch, caplog):
    sink, whole = JsonlSink(tmp_path / "metrics.jsonl", 0), JsonlSink(tmp_path / "whole.jsonl", 0)
    for step in range(1, 7):
        monkeypatch.setattr(jsonl, "os", os)
        whole.log(step, step, {"lm loss": 0.25})
        monkeypatch.setattr(jsonl, "os", Full(room if step == 2 else 0 if step in (3, 4) else 10**6))
        sink.log(step, step, {"lm loss": 0.25})
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert caplog.text.count("cannot be written") == 1
    monkeypatch.setattr(jsonl, "os", Full(5))
    sink.log(7, 7, {"lm loss": 0.25})
    with pytest.raises(UserError, match=r"the last 1 line of .*metrics.jsonl could not be written"):
        sink.close()
    assert [line["step"] for line in read_metrics(str(tmp_path / "metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    run_dir = tmp_path / "run"
    sink = JsonlSink(run_dir / "metrics.jsonl", 0)
    sink.log(1, 1, {})
    shutil.rmtree(run_dir)
    sink.log(2, 2, {})
    shutil.rmtree(run_dir)
    progress.append(run_dir, "exit", step=3)
    sink.log(3, 3, {})
    sink.close()
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [3]
    assert "step=3" in (run_dir / "progress.txt").read_text()


def test_a_progress_file_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "progress.txt").mkdir()
    progress.append(tmp_path, "exit", step=1)
    assert "training continues without it" in caplog.text


def test_samples_of_an_evaluation_that_cannot_be_written_end_no_run(tmp_path, caplog):
    predictions.write_samples(tmp_path / "gone" / "samples.json", [], 8, None)
    assert "samples.json cannot be written" in caplog.text and "training continues" in caplog.text
