"""Sweeps: combinations of values, the tasks here and in a SLURM array, failures and a start again."""

import shlex
import stat
import sys
from pathlib import Path

import pytest

from mimo_train.cli import main
from mimo_train.config.errors import UserError
from mimo_train.launch import sweep as sweeps
from mimo_train.launch.start import launch_of
from mimo_train.launch.sweep import combinations, open_sweep, slurm_command, visible_gpus


@pytest.mark.parametrize(
    ("texts", "tasks"),
    [
        (["a=1,2", "b=x"], [["a=1", "b=x"], ["a=2", "b=x"]]),
        (["a=1,2", "b=x,y"], [["a=1", "b=x"], ["a=1", "b=y"], ["a=2", "b=x"], ["a=2", "b=y"]]),
        (["a=[1,2],{b: 3, c: 4}"], [["a=[1,2]"], ["a={b: 3, c: 4}"]]),
        (["a='1,2',3"], [["a='1,2'"], ["a=3"]]),
        (["a"], "expected KEY=VALUE"),
        (["a=1,,2"], "expected KEY=VALUE"),
        (["a=1,1"], "a has a value twice"),
        (["run.dir=x,y"], "run.dir is that of the sweep"),
        (["a=1", "a=2"], "a has a value twice, or is given twice"),
    ],
)
def test_combinations_of_values(texts, tasks):
    if isinstance(tasks, str):
        with pytest.raises(UserError, match=f"^--sweep: .*{tasks}"):
            combinations(texts)
    else:
        assert combinations(texts) == tasks


SWEEP = ["--sweep", "optim.lr=1e-3,3e-4", "--sweep", "run.seed=1,2"]


def opened(folder: Path):
    return open_sweep("gpt_tiny", [f"run.dir={folder}"], [SWEEP[1], SWEEP[3]])


def test_a_task_is_the_same_here_and_in_a_slurm_array(tmp_path):
    sweep = opened(tmp_path / "my sweep")
    (tmp_path / "my sweep" / "task_2").mkdir()
    (tmp_path / "my sweep" / "task_2" / "progress.txt").write_text(
        "2026-01-01T00:00:00+00:00\tstart\tstep=0\n2026-01-01T00:00:09+00:00\texit\tstep=300\treason=finished\n"
    )
    command = shlex.split(slurm_command(sweep, 2))
    variable, value = command[0].split("=", 1)
    assert command[1:5] == ["sbatch", "--array=1,3,4%2", "scripts/slurm/train_vlm.sbatch", "gpt_tiny"]
    for task in sweep.tasks:
        environment = {variable: value, "SLURM_ARRAY_TASK_ID": str(task.number)}
        assert launch_of(command[4], command[5:], None, environment).cfg == task.cfg
    with pytest.raises(UserError, match=r"^run.dir: .* has another sweep"):
        open_sweep("gpt_tiny", [f"run.dir={sweep.folder}"], ["run.seed=1,2"])
    with pytest.raises(UserError, match=r"^run.dir: .* is the folder of a run"):
        open_sweep("gpt_tiny", [f"run.dir={sweep.folder}/task_2"], ["run.seed=1,2"])
    with pytest.raises(UserError, match=r"^--sweep: optim.lr: .*\(in optim.lr=-1\)"):
        open_sweep("gpt_tiny", [f"run.dir={tmp_path / 'wrong'}"], ["optim.lr=-1,1e-3"])
    with pytest.raises(UserError, match=r"^checkpoint.dir: s3://a/b is that of several tasks"):
        open_sweep("gpt_tiny", [f"run.dir={tmp_path / 'wrong'}", "checkpoint.dir=s3://a/b"], ["run.seed=1,2"])
    assert not (tmp_path / "wrong").exists()


def test_gpus_are_shared_between_tasks_that_run_at_once(tmp_path):
    sweep = opened(tmp_path)
    gpus = {"CUDA_VISIBLE_DEVICES": "2,3,5"}
    assert sweeps._slots(sweep.tasks, 3, gpus) == [{"CUDA_VISIBLE_DEVICES": name} for name in "235"]
    assert (
        sweeps._slots(sweep.tasks, 1, gpus) == [{}]
        and sweeps._slots(sweep.tasks, 2, {"CUDA_VISIBLE_DEVICES": ""}) == [{}] * 2
    )
    with pytest.raises(
        UserError, match="^--at-once: 4 tasks of 1 process need 4 GPUs, and there are 3. Set --at-once 3"
    ):
        sweeps._slots(sweep.tasks, 4, gpus)
    assert visible_gpus(gpus) == ["2", "3", "5"]


LAUNCHER = """
import json, os, sys
from pathlib import Path
values = dict(text.split("=", 1) for text in sys.argv if "=" in text)
assert "SLURM_ARRAY_TASK_ID" not in os.environ
folder = Path(values["run.dir"])
folder.mkdir(exist_ok=True)
print("trying", values["optim.lr"])
if values["optim.lr"] == "3e-4" and not (folder / "tried").exists():
    (folder / "tried").touch()
    sys.exit("no luck")
loss = float(values["optim.lr"]) * int(values["run.seed"])
line = {"step": 300, "consumed_samples": 1, "eval/loss": loss, "eval/samples": 1}
(folder / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
events = ("start\\tstep=0", "exit\\tstep=300\\treason=finished")
with (folder / "progress.txt").open("a") as file:
    file.writelines(f"2026-01-01T00:00:00+00:00\\t{event}\\n" for event in events)
"""
"""In place of the interpreter that starts ranks. At the first start, one learning rate has no luck."""


def test_what_failed_starts_again_and_what_finished_does_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {tmp_path}/launcher.py "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sweeps.sys, "executable", str(python))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")  # the array of another job
    command = ["launch", "sweep", "gpt_tiny", f"run.dir={tmp_path}/rates", *SWEEP, "--at-once", "2"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert out.count("started") == 4 and out.count(": finished in") == 2 and "  no luck" in out
    assert err.count("is not finished") == 2
    assert main(command) == 0
    out, _ = capsys.readouterr()
    assert "2 tasks of 4 finished before" in out and out.count("started") == 2
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("task_")]
    assert rows == ["task_3", "task_4", "task_1", "task_2"], "by eval/loss"
    assert (tmp_path / "rates" / "compare.html").exists()
    assert (tmp_path / "rates" / "task_3.log").read_text().count("trying 3e-4") == 2
    assert main([*command, "--slurm", "--metric", "eval/loss", "--mode", "max"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["task_2", "task_1", "task_4", "task_3"]
    assert "all 4 tasks are finished" in err
