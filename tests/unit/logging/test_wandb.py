import math

import pytest

from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import LogConfig
from mimo_train.logging.metrics_log import build_metrics_log
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.logging.sinks.trackers import has_api_key
from tests.unit.logging.wandb_reader import read_offline, records


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("mimo_train")]


def train(run_dir, steps, resumed_step=0):
    cfg = ConfigContainer(log=LogConfig(tensorboard=False, wandb=True))
    log = build_metrics_log(cfg, run_dir, resumed_step=resumed_step)
    for step in steps:
        log.log(step, 32 * step, {"lm loss": 0.1 + 0.2 * step, "learning_rate/images": 1e-3 / 3})
    log.log(steps[-1], 32 * steps[-1], {"eval/loss": 1 / 3, "eval/exact_match": 0.5})
    log.close()


def test_offline_runs_have_the_numbers_of_metrics_jsonl_and_a_resume_keeps_the_id(tmp_path, caplog):
    train(tmp_path, range(1, 5))
    first = read_metrics(tmp_path / "metrics.jsonl")
    train(tmp_path, range(5, 8), resumed_step=4)
    assert not warnings_of(caplog)
    ids, rows = read_offline(tmp_path)
    assert len(ids) == 2 and ids[0] == ids[1] == (tmp_path / "wandb_id.txt").read_text().strip()
    assert rows == read_metrics(tmp_path / "metrics.jsonl")
    assert rows[: len(first)] == first and [row["step"] for row in rows] == [1, 2, 3, 4, 4, 5, 6, 7, 7]


def test_a_new_run_in_the_same_folder_gets_a_new_id(tmp_path):
    train(tmp_path, range(1, 2))
    before = (tmp_path / "wandb_id.txt").read_text()
    train(tmp_path, range(1, 2))
    assert (tmp_path / "wandb_id.txt").read_text() != before


def test_the_x_axis_is_step(tmp_path):
    train(tmp_path, range(1, 3))
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
    assert any("*" in (metric.glob_name, metric.name) and metric.step_metric == "step" for metric in metrics)


def test_nan_is_a_value_like_any_other(tmp_path, caplog):
    cfg = ConfigContainer(log=LogConfig(tensorboard=False, wandb=True))
    log = build_metrics_log(cfg, tmp_path, resumed_step=0)
    log.log(1, 32, {"lm loss": math.nan})
    log.close()
    _, (row,) = read_offline(tmp_path)
    assert not warnings_of(caplog) and str(row["lm loss"]).lower() == "nan"


def test_a_key_is_found_in_the_environment_or_in_netrc(monkeypatch, tmp_path):
    assert not has_api_key()
    (tmp_path / "netrc").write_text("machine other.example login user password word\n")
    assert not has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example")
    assert has_api_key()
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_api_key()
