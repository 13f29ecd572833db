"""The launcher with ranks that only wait: who gets which signal, who is ended when, what the exit code says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mimo_train.launch import torchrun as launch
from tests.e2e.fake_python import pid_runs
from tests.hang import HANG_SECONDS
from tests.unit.launch.test_meeting import free_port

RANK = """
import os, signal, sys, time
from mimo_train.launch.torchrun import end_with_launcher
behaviour, rank = sys.argv[1], os.environ["RANK"]
received = 0
def note(signum, frame):
    global received
    received += 1
signal.signal(signal.SIGTERM, note)
if behaviour == "follow":
    end_with_launcher()
open(f"started{rank}.part", "w").write(str(os.getpid()))
os.rename(f"started{rank}.part", f"started{rank}")
while not os.path.exists(f"started{1 - int(rank)}"):
    time.sleep(0.05)
if rank == "1" and behaviour == "fail":
    sys.exit("error: learning rate is 7")
if rank == "1" and behaviour == "leave":
    sys.exit(0)
while behaviour == "leave" and not os.path.exists("go"):
    time.sleep(0.05)
if behaviour == "leave":
    sys.exit(0)
if rank == "1" and behaviour == "break":  # later, at the first start, then twice in the same way
    from pathlib import Path
    from mimo_train.flight.recorder import RECORDER
    folder = RECORDER.open(Path("run"), 1, 2)
    RECORDER.begin_step(5 if "MIMO_RESTART" in os.environ else 3)
    RECORDER.note(1, "RuntimeError: broken")
    RECORDER.beat(0.0)
    Path(os.environ["MIMO_SCRATCH"], "flight").write_text(str(folder.absolute()))
    sys.exit(7)
if rank == "1" and behaviour == "ask":
    sys.exit(16)
if rank == "1" and behaviour == "die":
    os.kill(os.getpid(), signal.SIGKILL)
while not received or behaviour in ("fail", "ask", "die", "stuck", "break"):
    time.sleep(0.05)
while behaviour == "save" and not os.path.exists("go"):  # as if saving
    time.sleep(0.05)
open(f"saved{rank}", "w").write(str(received))
"""


FORKED = """
import sys
from mimo_train.launch import forked, torchrun
forked.PROGRAM = "json"  # ours takes seconds, and these ranks need nothing of it
sys.exit(torchrun.main(["--forked=cpu", *sys.argv[1:]]))
"""
both_ways = pytest.mark.parametrize("start", ["own", "forked"], indirect=True)


@pytest.fixture
def start(request, tmp_path):
    """Starts two ranks of a behaviour, as nohup does, and returns the launcher once both run. The ranks are processes
    of their own, or forked."""
    program = (
        ["-u", "-c", FORKED] if getattr(request, "param", "own") == "forked" else ["-m", "mimo_train.launch.torchrun"]
    )
    (tmp_path / "rank.py").write_text(RANK)
    started = [tmp_path / f"started{rank}" for rank in (0, 1)]
    launchers = []

    def start(behaviour: str, *more: str, **variables: str) -> subprocess.Popen:
        options = ["--standalone", "--nproc-per-node=2", *more, "-m", "rank", behaviour]
        command = [sys.executable, *program, *options]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        launcher = subprocess.Popen(
            ["nohup", *command], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        launchers.append(launcher)
        while not all(file.exists() for file in started):
            assert launcher.poll() is None, launcher.communicate()[1]
            time.sleep(0.05)
        return launcher

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    for file in started:
        if file.exists() and pid_runs(int(file.read_text())):
            os.kill(int(file.read_text()), signal.SIGKILL)


def ranks(folder: Path) -> list[int]:
    return [int((folder / f"started{rank}").read_text()) for rank in (0, 1)]


@both_ways
def test_a_stop_reaches_each_rank_once_and_waits_for_it(start, tmp_path):
    launcher = start("save")
    # Between them a moment, in which a launcher that does it wrong would send its ranks one signal more.
    # SIGINT comes twice, as `timeout` forwards that of a terminal.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        launcher.send_signal(number)
        time.sleep(0.2)
    (tmp_path / "go").touch()
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 0, err
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert len(err.splitlines()) == 1 and "SIGINT" in err


def test_the_others_go_on_when_a_rank_without_a_module_leaves(start, tmp_path):
    launcher = start("leave")
    stays, leaves = ranks(tmp_path)
    while pid_runs(leaves):
        time.sleep(0.05)
    time.sleep(1)  # in which a launcher that does it wrong would end the other rank: it looks every 0.1 s
    assert pid_runs(stays) and launcher.poll() is None
    (tmp_path / "go").touch()
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert (launcher.returncode, err) == (0, "")


def test_ranks_that_do_not_finish_in_time_are_ended(start, tmp_path):
    launcher = start("stuck", MIMO_GRACE_SECONDS="0.5")
    launcher.send_signal(signal.SIGUSR1)
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 1
    assert "did not finish within 0.5 s" in err
    assert not any(map(pid_runs, ranks(tmp_path)))


@pytest.mark.parametrize(
    ("start", "behaviour", "words"),
    [
        ("own", "fail", ["error: learning rate is 7", "exit code 1"]),
        ("forked", "die", ["rank 1", "SIGKILL"]),
    ],
    indirect=["start"],
)
def test_one_failed_rank_ends_the_others_and_has_the_word(start, tmp_path, behaviour, words):
    launcher = start(behaviour)
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 1
    assert not any(map(pid_runs, ranks(tmp_path)))
    lines = err.splitlines()
    assert len(lines) == (2 if behaviour == "fail" else 1), err
    assert words[0] in lines[0] and words[1] in lines[-1] and "rank 1" in lines[-1]


def test_a_run_that_asks_for_another_machine_ends_with_its_exit_code(start):
    launcher = start("ask")
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 16
    assert len(err.splitlines()) == 1 and "exit code 16" in err and "another machine" in err


@pytest.mark.parametrize("start", ["forked"], indirect=True)
def test_a_failed_run_is_started_again_until_it_fails_twice_in_the_same_way(start):
    launcher = start("break", "--max-restarts=5", MIMO_RESTART_SECONDS="0")
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 7
    told = [line for line in err.splitlines() if "restart" in line or "again" in line]
    assert "exit code 7 at step 3 (RuntimeError: broken); restart 1 of 5" in told[0], err
    assert "exit code 7 at step 5 (RuntimeError: broken); restart 2 of 5" in told[1]
    assert "not started again: the same failure twice, exit code 7 at step 5 (RuntimeError: broken)" in told[2]
    assert len(told) == 3


@both_ways
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has died")
def test_ranks_save_and_end_when_the_launcher_is_killed_also_stopped_ones(start, tmp_path):
    launcher = start("follow", MIMO_GRACE_SECONDS="3", TMPDIR=str(tmp_path))
    assert [*tmp_path.glob("mimo-train-*")]
    os.kill(ranks(tmp_path)[1], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    while any(map(pid_runs, ranks(tmp_path))) or [*tmp_path.glob("mimo-train-*")]:
        time.sleep(0.05)
    assert (tmp_path / "saved0").exists() and not (tmp_path / "saved1").exists()


@pytest.mark.parametrize("seconds", ["soon", "0", "-3", "inf", "nan"])
def test_a_wrong_time_of_grace_is_told(monkeypatch, seconds):
    monkeypatch.setenv("MIMO_GRACE_SECONDS", seconds)
    with pytest.raises(ValueError, match=f"MIMO_GRACE_SECONDS is '{seconds}'"):
        launch.main([])


WARNINGS = """
import sys
from datetime import timedelta
import torch.distributed as dist
from mimo_train.launch.cpp_log import errors_only
for last in (False, True):
    if last:
        errors_only()
    print("again" if last else "once", file=sys.stderr, flush=True)
    try:
        dist.TCPStore("localhost", 1, 2, False, timeout=timedelta(seconds=1))
    except dist.DistNetworkError:
        pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the library's name is that of Linux")
def test_warnings_of_an_imported_torch_end_where_errors_only_are_asked_for():
    variables = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    command = [sys.executable, "-c", WARNINGS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    once, again = done.stderr.split("again\n")
    assert "[W" in once and "[E" in again and "[W" not in again, done.stderr


def test_a_launcher_that_waits_for_one_that_has_left_is_quiet(tmp_path):
    """As at the end of a run, where the launcher with the store may be the first to leave; here it is killed."""
    leave = "touch over1; echo ${TORCH_CPP_LOG_LEVEL-unset}"
    lose = "until test -e over1; do sleep 0.05; done; sleep 1; kill -9 $PPID"
    nodes = ["--nnodes=2", "--master-addr=localhost", f"--master-port={free_port()}", "--nproc-per-node=1"]
    launchers = []
    for node, does in enumerate((lose, leave)):
        options = [*nodes, f"--node-rank={node}", "--no-python", "sh", "-c", does]
        launchers.append(
            subprocess.Popen(
                [sys.executable, "-m", "mimo_train.launch.torchrun", *options],
                cwd=tmp_path,
                env={name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [launcher.communicate(timeout=HANG_SECONDS)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [-signal.SIGKILL, 0], outputs
    assert outputs[1] == "unset\n", "of the rank, whose own warnings stay"
