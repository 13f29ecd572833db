"""kill -9 of launched runs: of a rank or of the launcher, at a step or inside a save, which both also write beside
training. Each round goes on from what the one before has left."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.config.compose import load
from mimo_train.flight.read import newest_start, read_ranks
from tests.dist.checkpoint.test_saving import exact, raw_steps
from tests.dist.exit_callbacks import KILLED
from tests.dist.runs import train_on_ranks
from tests.e2e.fake_python import pid_runs
from tests.e2e.test_exit_paths import events
from tests.e2e.test_train import digits, finish, start  # noqa: F401 (a fixture)
from tests.hang import HANG_SECONDS

ROUNDS = int(os.environ.get("MIMO_KILL_ROUNDS", "1"))
"""For each log interval; at more than the default ones, with both intervals."""
KINDS = list(itertools.product(("launcher", "rank"), ("save", "step")))
"""Who is killed, and where."""


def wait_for_end(processes: list[int]) -> None:
    """Of ranks that no launcher waits for."""
    deadline = time.monotonic() + HANG_SECONDS
    while any(map(pid_runs, processes)):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.1)


@pytest.mark.parametrize("interval", [5] if ROUNDS == 1 else [1, 5])
def test_launched_runs_that_are_killed_leave_the_curve_as_it_is(interval, digits, tmp_path, monkeypatch):  # noqa: F811
    """Its lines too: none is torn, missing or there twice. Without their launcher, ranks save and end. By default the
    launcher is killed inside a save; MIMO_KILL_ROUNDS=25 makes 50 rounds, in which both are killed in both places."""
    run_dir, generator = tmp_path / "run", random.Random(interval)
    (tmp_path / "exit_callbacks.py").write_text((Path(__file__).parents[1] / "dist" / "exit_callbacks.py").read_text())
    (tmp_path / "disk_faults.py").write_text((Path(__file__).parents[1] / "disk_faults.py").read_text())
    overrides = (
        f"data.shards={digits}/train",
        "data.validation_shards=",
        "data.demo=",
        f"train.iters={300 + 8 * ROUNDS}",
        f"train.log_interval={interval}",
        "checkpoint.save_interval=3",
        "checkpoint.keep=0",
        "modules.language.llm.num_layers=2",
        "data.workers=2",
    )
    command = ("vlm_digits", f"run.dir={run_dir}", *overrides)
    places = {kind: [] for kind in KINDS}
    for number in range(ROUNDS):
        kind = KINDS[number % 4]
        newest = folders.newest(run_dir)
        at = generator.randrange(16) if kind[1] == "save" else folders.step_in(newest) + 1 if newest else 1
        at += generator.randrange(5) if kind[1] == "step" else 0
        monkeypatch.setenv("MIMO_TEST_KILL", f"{generator.randrange(2)}:{kind[0]}:{kind[1]}:{at}")
        beside = f"checkpoint.asynchronous={str(generator.random() < 0.5).lower()}"
        process = start(
            "train_vlm.sh", *command, beside, "train.callbacks=[exit_callbacks:KillsFromEnvironment]", cwd=tmp_path
        )
        printed = finish(process)
        assert (tmp_path / KILLED).exists(), printed
        assert process.returncode == -signal.SIGKILL if kind[0] == "launcher" else process.returncode > 0, printed
        wait_for_end([rank.pid for rank in read_ranks(newest_start(run_dir)).values()])
        if kind[0] == "launcher":
            ended = events(run_dir, "exit")[-1]
            assert ended["reason"] == "signal", ended
            assert folders.step_in(folders.newest(run_dir)) == int(ended["step"])
        places[kind].append((tmp_path / KILLED).read_text())
        (tmp_path / KILLED).unlink()
    assert all(places[kind] for kind in KINDS[:ROUNDS]), places
    newest = folders.newest(run_dir)
    last = 3 + (folders.step_in(newest) if newest else 0)
    for folder in (run_dir, tmp_path / "alone"):
        train_on_ranks(load("vlm_digits", (*overrides, f"run.dir={folder}", f"train.exit_interval={last}")))
    assert exact(run_dir) == exact(tmp_path / "alone")
    assert raw_steps(run_dir) == raw_steps(tmp_path / "alone")
    told = "; ".join(f"{who} at a {where}: {len(found)}" for (who, where), found in places.items())
    inside = sorted({place for (_, where), found in places.items() if where == "save" for place in found})
    print(f"log_interval {interval}: {told}; inside saves before: {', '.join(inside)}")
