"""Every way a run of two processes ends: on all ranks, with its exit code, and a checkpoint where one is due."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.training.callbacks import Callback
from mimo_train.training.shutdown import ExitVotes
from tests.dist.exit_callbacks import At
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, train_on_ranks
from tests.e2e.test_launch import free_port
from tests.e2e.test_train import digits, finish, start, wait_for, whole_lines  # noqa: F401 (a fixture)

ENCODER, LANGUAGE = 0, 1


def events(run_dir: Path, name: str) -> list[dict[str, str]]:
    """The facts of each line of one event in progress.txt."""
    rows = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    return [dict(fact.split("=", 1) for fact in row[2:]) for row in rows if row[1] == name]


class OutOfTime(Callback):
    """The time is over as the first step starts. Over before, a slow rank would give up the wait for its samples."""

    def votes(self, *arguments, **options) -> ExitVotes:
        self._votes = ExitVotes(*arguments, **options)
        return self._votes

    def on_step_start(self, state) -> None:
        self._votes._deadline = time.monotonic()


def _rank(cfg, callback: Callback | None, late_rank: int | None, gone: bool, stopped_code: int) -> int:
    """One rank as `mimo-train train` runs it; `late_rank` alone finds that its time is over. What it prints is for a
    reader that has gone, or a full disk."""
    if gone:
        read, write = os.pipe()
        os.close(read)
    os.dup2(write if gone else os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = open(1, "w", closefd=False)  # that of pytest goes elsewhere
    from mimo_train.commands.train import main
    from mimo_train.training import pretrain

    os.environ["MIMO_STOPPED_CODE"] = str(stopped_code)
    if late_rank is not None:
        cfg.train.exit_duration_minutes = 60
    if int(os.environ["RANK"]) == late_rank:
        callback = OutOfTime()
        pretrain.ExitVotes = callback.votes
    original = pretrain.pretrain
    pretrain.pretrain = lambda run, **options: original(run, callbacks=[callback] if callback else [], **options)
    return main(resolve(cfg))


def test_a_run_ends_for_every_reason_in_turn_and_goes_on(digits, tmp_path):  # noqa: F811
    """One run of 9 steps, ended five times before. Each job is the same command, but for what ends it."""
    jobs = [  # (reason, step it ends at, what ends it)
        ("exit_interval", 2, {"overrides": ("train.exit_interval=2",)}),
        ("exit_duration_minutes", 3, {"late_rank": ENCODER}),
        ("exit_duration_minutes", 4, {"late_rank": LANGUAGE}),
        ("signal", 6, {"callback": At(ENCODER, 6, signal.SIGTERM)}),
        ("signal", 7, {"callback": At(LANGUAGE, 7, signal.SIGUSR1)}),
        ("finished", 9, {}),
    ]
    for number, (reason, step, what) in enumerate(jobs):
        overrides = ("train.iters=9", "layout=two_processes", "checkpoint.keep=0", *what.get("overrides", ()))
        cfg = config("vlm_digits", tmp_path, digits, *overrides)
        stopped_code = 75 * (number % 2)
        codes = run_ranks(_rank, 2, cfg, what.get("callback"), what.get("late_rank"), number % 2 == 0, stopped_code)
        assert codes == [0 if reason == "finished" else stopped_code] * 2, reason
        assert events(tmp_path, "exit")[-1] == {"step": str(step), "reason": reason}
        assert folders.newest(tmp_path).name == f"step_{step:08d}"
    assert [(int(save["step"]), save["reason"]) for save in events(tmp_path, "checkpoint")] == [
        (step, reason) for reason, step, _ in jobs
    ], "one save for each exit"
    assert [point[0] for point in curve(read_metrics(tmp_path / "metrics.jsonl"))] == list(range(1, 10))


OVERRIDES = (
    "data.validation_shards=",
    "data.demo=",
    "train.iters=300",
    "checkpoint.asynchronous=false",  # so that the newest checkpoint at a failure is known
    "checkpoint.save_interval=2",
    "checkpoint.keep=0",
    "modules.language.llm.num_layers=2",
    "data.workers=2",
)


@pytest.fixture
def command(digits, tmp_path) -> tuple[str, ...]:  # noqa: F811
    """Arguments of a run with `FromEnvironment`, in `run` of tmp_path."""
    # Found from the working directory, as a user's own would be.
    (tmp_path / "exit_callbacks.py").write_text((Path(__file__).parents[1] / "dist" / "exit_callbacks.py").read_text())
    own = "train.callbacks=[exit_callbacks:FromEnvironment]"
    return "vlm_digits", f"run.dir={tmp_path}/run", f"data.shards={digits}/train", *OVERRIDES, own


def require_the_curve_of_a_run_that_was_left_alone(digits: Path, run_dir: Path) -> None:  # noqa: F811
    found = curve(read_metrics(run_dir / "metrics.jsonl"))
    places = (f"data.shards={digits}/train", f"run.dir={run_dir.parent}/alone")
    alone = load("vlm_digits", (*OVERRIDES, *places, f"train.exit_interval={found[-1][0]}"))
    assert found == curve(train_on_ranks(alone))


def test_two_nodes_and_a_signal(digits, command, tmp_path, monkeypatch):  # noqa: F811
    """Launched twice, once as two nodes of one process each. A callback raises on one rank, at each start before the
    same step, while a save is in flight: both nodes start again, go on, and end with the finding. Then SIGTERM ends the
    run, while a save is in flight again. In the end the curve is that of a run that was left alone."""
    run_dir = tmp_path / "run"
    monkeypatch.setenv("MIMO_TEST_BREAK", f"{LANGUAGE}:4")
    nodes = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in (nodes | {"MIMO_MAX_RESTARTS": "5", "MIMO_RESTART_SECONDS": "0"}).items():
        monkeypatch.setenv(name, value)
    launchers = []
    for node in ("0", "1"):
        monkeypatch.setenv("NODE_RANK", node)
        launchers.append(start("train_vlm.sh", *command, "checkpoint.asynchronous=true", cwd=tmp_path))
    for node, process in enumerate(launchers):
        printed = finish(process)
        assert process.returncode == 1, printed
        said = "exit code 1 at step 4 (RuntimeError: broken on purpose before step 4)"
        assert f"{said}; restart 1 of 5" in printed, printed
        assert f"not started again: the same failure twice, {said}" in printed.splitlines()[-1], printed
        assert (f"rank {LANGUAGE}: RuntimeError: broken on purpose before step 4" in printed) == (node == LANGUAGE)
    # The save of step 2 was in flight: told of by nobody, and complete if node 0 has seen both parts in time.
    assert not events(run_dir, "checkpoint")
    first, second = (job["step"] for job in events(run_dir, "start"))
    assert first == "0" and second in ("0", "2")
    assert len(list((run_dir / "flight").iterdir())) == 2, "each start has its folder"
    assert not events(run_dir, "exit"), "a failure is no exit"

    for name in (*nodes, "NODE_RANK", "MIMO_MAX_RESTARTS", "MIMO_TEST_BREAK"):
        monkeypatch.delenv(name)
    newest = folders.newest(run_dir)
    began = str(int(newest.name[5:])) if newest else "0"
    always = ("checkpoint.asynchronous=true", "checkpoint.save_interval=1")  # one is in flight at most times
    process = start("train_vlm.sh", *command, *always, cwd=tmp_path)
    wait_for(lambda: whole_lines(run_dir) >= 6, process)
    process.send_signal(signal.SIGTERM)
    printed = finish(process)
    assert process.returncode == 0, printed
    found = curve(read_metrics(run_dir / "metrics.jsonl"))
    assert events(run_dir, "exit")[-1] == {"step": str(found[-1][0]), "reason": "signal"}
    assert folders.newest(run_dir).name == f"step_{found[-1][0]:08d}"
    assert [job["step"] for job in events(run_dir, "start")] == [first, second, began]

    require_the_curve_of_a_run_that_was_left_alone(digits, run_dir)
