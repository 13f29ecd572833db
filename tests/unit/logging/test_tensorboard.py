import math
import shutil
import threading
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mimo_train.config.schema import ConfigContainer
from mimo_train.logging.metrics_log import build_metrics_log
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.logging.sinks.trackers import TensorboardSink
from tests.hang import HANG_SECONDS


def train(run_dir, steps, resumed_step=0):
    log = build_metrics_log(ConfigContainer(), run_dir, resumed_step=resumed_step)
    for step in steps:
        log.log(step, 32 * step, {"lm loss": 1 / (step + resumed_step), "learning_rate/images": 1e-3 / step})
        if step % 5 == 0:
            log.log(step, 32 * step, {"eval/loss": 1 / step, "eval/exact_match": math.nan})
    log.close()


def by_key(lines):
    found = {}
    for line in lines:
        for key, value in line.items():
            if key != "step":
                found.setdefault(key, []).append((line["step"], np.float32(value)))
    return found


def test_tensorboard_has_the_numbers_of_metrics_jsonl_also_after_a_resume(tmp_path):
    train(tmp_path, range(1, 9))
    train(tmp_path, range(5, 13), resumed_step=4)
    expected = by_key(read_metrics(tmp_path / "metrics.jsonl"))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    read = {
        key: [(event.step, np.float32(event.value)) for event in events.Scalars(key)]
        for key in events.Tags()["scalars"]
    }
    assert (
        set(read)
        == set(expected)
        == {
            "consumed_samples",
            "lm loss",
            "learning_rate/images",
            "eval/loss",
            "eval/exact_match",
        }
    )
    for key in expected:
        np.testing.assert_array_equal(read[key], expected[key], err_msg=key)
    assert [step for step, _ in read["lm loss"]] == list(range(1, 13))


def test_a_folder_that_is_removed_is_told_once_and_without_a_traceback(tmp_path, monkeypatch):
    unhandled = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    before = threading.excepthook
    sink = TensorboardSink(tmp_path / "events", 0)
    worker = sink.handle.file_writer.event_writer._async_writer._worker
    shutil.rmtree(tmp_path / "events")
    deadline = time.monotonic() + HANG_SECONDS
    with pytest.raises(FileNotFoundError):
        while time.monotonic() < deadline:
            worker._next_flush_time = 0  # else it writes the folder every 15 seconds
            sink.log(1, 1, {"lm loss": 1.0})
            time.sleep(0.01)
    assert unhandled == []
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [found.exc_type for found in unhandled] == [ZeroDivisionError]
    with pytest.raises(FileNotFoundError):
        sink.close()
    assert threading.excepthook == before
