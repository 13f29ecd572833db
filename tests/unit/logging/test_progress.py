from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from mimo_train.bridge.training.train import (
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.schema_run import RunConfig
from mimo_train.layout.run import resolve
from mimo_train.logging import progress
from mimo_train.logging.progress import append, job_started


def test_events_are_appended_lines_of_tab_separated_columns(tmp_path):
    run_dir = tmp_path / "run"
    job_started(run_dir, world_size=2, step=0)
    append(run_dir, "checkpoint", step=200, path="checkpoints/step_00000200", reason="save_interval")
    append(run_dir, "evaluation", step=200, sets="5d41", **{"eval/loss": 0.31214, "eval/samples": 512})
    append(run_dir, "exit", step=800, reason="one\ntwo\r\nthree")
    rows = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    assert [row[1:] for row in rows] == [
        ["start", "world_size=2", "step=0", "flops=0"],
        ["checkpoint", "step=200", "path=checkpoints/step_00000200", "reason=save_interval"],
        ["evaluation", "step=200", "sets=5d41", "eval/loss=0.31214", "eval/samples=512"],
        ["exit", "step=800", "reason=one two three"],
    ]
    assert all(datetime.fromisoformat(row[0]).tzinfo is not None for row in rows)


def run_config(run_dir, world_size):
    module = ModuleConfig(llm=LlmSpec())
    module.layout.dp = world_size
    data = DataConfig(sequence_length=64)
    cfg = ConfigContainer(run=RunConfig(dir=str(run_dir)), modules={LANGUAGE: module}, data=data)
    cfg.train.global_batch_size = cfg.train.micro_batch_size * world_size
    return cfg


def write(run_dir, *jobs):
    """A progress.txt with jobs (minute of start, processes, step, FLOPs before), each with a checkpoint behind it."""
    lines = []
    for minute, world_size, step, flops in jobs:
        lines.append(
            f"2026-11-21T09:{minute:02}:00+00:00\tstart\tworld_size={world_size}\tstep={step}\tflops={flops:g}"
        )
        lines.append(f"2026-11-21T09:{minute:02}:30+00:00\tcheckpoint\tstep={step + 9}\tpath=p\treason=save_interval")
    (run_dir / "progress.txt").write_text("".join(f"{line}\n" for line in lines))


def at(minute):
    return datetime(2026, 11, 21, 9, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("jobs", "found"),
    [
        ([(0, 2, 0, 0)], (0, 0.0)),
        ([(0, 2, 0, 0), (5, 2, 10, 4e15)], (0, 0.0)),
        ([(0, 4, 0, 0), (5, 2, 10, 4e15), (8, 2, 20, 6e15)], (5, 4e15)),
        ([(0, 2, 0, 0), (5, 4, 10, 4e15), (8, 2, 20, 6e15)], (8, 6e15)),
        ([(0, 2, 0, 0), (5, 2, 0, 0), (8, 2, 20, 6e15)], (5, 0.0)),
    ],
    ids=["one job", "resumed", "fewer processes", "processes came and went", "a new run in the same folder"],
)
def test_start_of_the_jobs_with_as_many_processes(tmp_path, jobs, found):
    write(tmp_path, *jobs)
    minute, flops = found
    assert get_start_time_from_progress_log(run_config(tmp_path, 2)) == (at(minute), flops)


def test_a_log_of_another_number_of_processes_is_refused(tmp_path):
    write(tmp_path, (0, 2, 0, 0), (5, 4, 10, 4e15))
    with pytest.raises(ValueError, match=r"run\.dir: .* is not of a run on 2 processes: its last job had 4"):
        get_start_time_from_progress_log(run_config(tmp_path, 2))
    (tmp_path / "progress.txt").write_text("")
    with pytest.raises(ValueError, match="it has no job"):
        get_start_time_from_progress_log(run_config(tmp_path, 2))


def test_throughputs_of_the_job_and_of_all_jobs(tmp_path, monkeypatch):
    write(tmp_path, (0, 4, 0, 0), (10, 2, 100, 1e15), (50, 2, 200, 3e15))
    monkeypatch.setattr(progress.time, "time", lambda: at(50).timestamp() + 500)
    cfg = run_config(tmp_path, 2)
    state = SimpleNamespace(
        cfg=cfg,
        layout=resolve(cfg).layout,
        run_dir=tmp_path,
        train_state=SimpleNamespace(step=300, consumed_train_tokens=153600),
        job_seconds=500,
    )
    compute_throughputs_and_append_to_progress_log(state, 7e15)
    *_, last = (tmp_path / "progress.txt").read_text().splitlines()
    assert last.split("\t")[1:] == [
        "throughput",
        "step=300",
        "flops=7e+15",
        "tokens=153600",
        # 4e15 in 500 seconds on 2 devices; 6e15 in 40 minutes and 500 seconds.
        "job_tflops=4",
        "cumulative_tflops=1.03",
    ]


@pytest.mark.parametrize(
    "spoilt",
    [b"\n", b"\xff\xfe\n", b"2026-11-21T09:50:00+00:00\tstart\tworld_s", b"then\tstart\tworld_size=x\n", b"a\tstart\n"],
)
def test_a_spoilt_line_stops_no_run(tmp_path, spoilt):
    """Blank, no text, torn by a kill, or edited: what other lines say still counts."""
    write(tmp_path, (0, 2, 0, 0), (5, 2, 10, 4e15))
    with (tmp_path / "progress.txt").open("ab") as file:
        file.write(spoilt)
    progress.throughput(tmp_path, world_size=2, step=30, tokens=1, flops=6e15, job_seconds=500)
    *_, before, last = (tmp_path / "progress.txt").read_bytes().splitlines()
    assert before == spoilt.rstrip(b"\n") and b"\tjob_tflops=2\t" in last, "the torn line has ended"
    assert progress.start_of_jobs(tmp_path, 2) == (at(0), 0.0)


def test_what_job_started_notes_is_found_again(tmp_path):
    job_started(tmp_path, world_size=2, step=7, flops=1 / 3)
    began, flops = get_start_time_from_progress_log(run_config(tmp_path, 2))
    assert flops == 1 / 3 and abs((datetime.now(UTC) - began).total_seconds()) < 600
