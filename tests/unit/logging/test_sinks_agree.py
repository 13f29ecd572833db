"""Every sink holds the numbers of metrics.jsonl, as its own library reads them, also after a resume."""

import base64
import json
import math
import os
import zipfile

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import LogConfig
from mimo_train.logging.metrics_log import SINKS, build_metrics_log
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.logging.sinks.trackers import has_api_key
from tests.unit.logging.report.made_up_runs import PNG
from tests.unit.logging.wandb_reader import read_offline, records

SAMPLE = {"images": [PNG], "clips": [], "question": "a | b\nc", "answer": "6", "truth": "7", "correct": False}
EVERY_SINK = LogConfig(wandb=True, mlflow=True, comet=True)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Nobody is logged in anywhere, and no tracker is set up."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "COMET_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "comet.config"))
    return tmp_path


def job(run_dir, steps, resumed_step=0):
    """Log `steps` as a job that goes on after `resumed_step`; returns the handles of the sinks."""
    log = build_metrics_log(ConfigContainer(log=EVERY_SINK), run_dir, resumed_step=resumed_step)
    for step in steps:
        values = {"lm loss": 0.1 + 0.2 * step, "learning_rate/images": 1e-3 / 3, "time/images/compute": 1 / step}
        log.log(step, 32 * step, values)
        if step % 5 == 0:
            log.log(step, 32 * step, {"eval/loss": 1 / step, "eval/exact_match": math.nan})
            log.samples(step, [SAMPLE, SAMPLE | {"images": []}])
    handles = {name: log.handle(name) for name in SINKS}
    log.close()
    return handles


def curves(lines):
    """key -> [(step, value)] of lines of metrics."""
    found = {}
    for line in lines:
        for key, value in line.items():
            if key not in ("step", "consumed_samples") or (key == "consumed_samples" and "lm loss" in line):
                found.setdefault(key, []).append((line["step"], float(value)))
    return found


def tensorboard_curves(run_dir, keys):
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {key: {event.step: event.value for event in events.Scalars(key)} for key in keys}


def wandb_curves(run_dir, keys):
    _, rows = read_offline(run_dir)
    return {key: {row["step"]: float(row[key]) for row in rows if key in row} for key in keys}


def mlflow_curves(handle, keys):
    client, run_id = handle
    found = {}
    for key in keys:
        points = sorted(client.get_metric_history(run_id, key), key=lambda point: point.timestamp)
        found[key] = {point.step: point.value for point in points}
    return found


def comet_messages(run_dir):
    from comet_ml.offline import unzip_offline_archive

    for archive in sorted((run_dir / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns):
        assert zipfile.is_zipfile(archive)
        with open(os.path.join(unzip_offline_archive(str(archive)), "messages.json")) as file:
            yield from map(json.loads, file)


def comet_curves(run_dir, keys):
    found = {key: {} for key in keys}
    for message in comet_messages(run_dir):
        metric = message["payload"].get("metric", {})
        if metric.get("metricName") in found:
            found[metric["metricName"]][metric["step"]] = float(metric["metricValue"])
    return found


def test_every_sink_has_the_numbers_of_metrics_jsonl_also_after_a_crash_and_a_resume(alone, caplog):
    run_dir = alone / "run"
    first = job(run_dir, range(1, 9))
    second = job(run_dir, range(5, 13), resumed_step=4)
    assert not [record for record in caplog.records if record.name.startswith("mimo_train")]

    expected = {key: dict(points) for key, points in curves(read_metrics(run_dir / "metrics.jsonl")).items()}
    assert list(expected["lm loss"]) == list(range(1, 13)) and list(expected["eval/loss"]) == [5, 10]
    found = {
        "tensorboard": tensorboard_curves(run_dir, expected),
        "wandb": wandb_curves(run_dir, expected),
        "mlflow": mlflow_curves(second["mlflow"], expected),
        "comet": comet_curves(run_dir, expected),
    }
    assert set(found) == SINKS.keys() - {"metrics.jsonl"}
    for sink, read in found.items():
        for key, points in expected.items():
            exact = {step: float(np.float32(value)) for step, value in points.items()}  # TensorBoard keeps 32 bits
            exact = exact if sink == "tensorboard" else points
            np.testing.assert_equal(read[key], exact, err_msg=f"{key} in {sink}")

    # Predictions with their images.
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [(image.step, image.encoded_image_string) for image in events.Images("samples/0")] == [
        (step, base64.b64decode(PNG)) for step in (5, 10)
    ]
    (text,) = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val
    assert text.decode().splitlines()[2] == "| 0 | a \\| b c | 6 | 7 | False |"
    _, rows = read_offline(run_dir)
    tables = [row["samples.path"] for row in rows if "samples.path" in row]
    table, *_ = [json.loads(path.read_text()) for path in run_dir.glob(f"wandb/*/files/{tables[-1]}")]
    assert table["data"][0][2:] == ["a | b\nc", "6", "7", "False"] and len(table["data"][0][1]) == 1
    client, run_id = second["mlflow"]
    assert [each.path for each in client.list_artifacts(run_id, "samples")] == [
        f"samples/step_{step:08d}.json" for step in (5, 10)
    ]
    assert any("samples/0" in json.dumps(message) for message in comet_messages(run_dir))

    # One run in each tracker, not one per job.
    assert first["mlflow"].run_id == second["mlflow"].run_id
    client, run_id = second["mlflow"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.tags["resumed_after_step"] == "4"
    assert run.data.params["train.iters"] == "1000"
    assert first["comet"].get_key() == second["comet"].get_key()
    assert first["wandb"].id == second["wandb"].id


def test_a_new_run_in_the_same_folder_is_a_new_run_everywhere(alone):
    before, after = job(alone / "run", range(1, 2)), job(alone / "run", range(1, 2))
    assert before["mlflow"].run_id != after["mlflow"].run_id
    assert before["comet"].get_key() != after["comet"].get_key()
    assert before["wandb"].id != after["wandb"].id


def test_the_x_axis_of_wandb_is_the_step(alone):
    job(alone / "run", range(1, 2))
    (path,) = alone.glob("run/wandb/offline-run-*/run-*.wandb")
    metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
    assert any("*" in (metric.glob_name, metric.name) and metric.step_metric == "step" for metric in metrics)


def test_a_key_of_wandb_is_in_the_environment_or_in_netrc(alone, monkeypatch):
    (alone / "netrc").write_text("machine other.example login user password word\n")
    assert not has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example")
    assert has_api_key()
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_api_key()


def test_mlflow_goes_where_the_environment_says(alone, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{alone / 'server.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    log = build_metrics_log(ConfigContainer(log=LogConfig(tensorboard=False, mlflow=True)), alone, resumed_step=0)
    log.log(1, 32, {"lm loss": 1.5})
    client, run_id = log.handle("mlflow")
    log.close()
    experiment = client.get_experiment_by_name("ours")
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [run_id]
    assert not (alone / "mlflow").exists() and (alone / "server.db").exists()
