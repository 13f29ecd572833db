"""The launcher with ranks that only wait: who gets which signal, who is ended when, what the exit code says."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.fake_python import pid_runs
from tests.hang import HANG_SECONDS

RANK = """
import os, signal, sys, time
behaviour, rank = sys.argv[1], os.environ["RANK"]
received = 0
def note(signum, frame):
    global received
    received += 1
signal.signal(signal.SIGTERM, note)
if behaviour in ("follow", "follow, stuck"):
    from pathlib import Path
    from mimo_train.flight.recorder import RECORDER
    from mimo_train.flight.watchdog import Watch
    from mimo_train.launch.exit_signal import grace_seconds
    Watch(RECORDER, Path("run"), 0, grace_seconds=grace_seconds())
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
    RECORDER.open(Path("run"), 1, 2)
    RECORDER.begin_step(5 if os.path.exists("broken") else 3)
    open("broken", "w").close()
    RECORDER.note(1, "RuntimeError: broken")
    RECORDER.beat(time.monotonic())
    sys.exit(7)
if rank == "1" and behaviour == "ask":
    sys.exit(16)
if rank == "1" and behaviour == "die":
    os.kill(os.getpid(), signal.SIGKILL)
while not received or "stuck" in behaviour:
    time.sleep(0.05)
while behaviour == "save" and not os.path.exists("go"):  # as if saving
    time.sleep(0.05)
open(f"saved{rank}", "w").write(str(received))
"""


LAUNCH = """
import os, sys
from pathlib import Path
from mimo_train.launch.nodes import Nodes
from mimo_train.launch.torchrun import launch
nodes = Nodes(max_restarts=int(os.environ.get("RESTARTS", 0)))
sys.exit(launch([sys.executable, "-u", "rank.py", sys.argv[1]], nodes, 2, Path("run")))
"""


@pytest.fixture
def start(tmp_path):
    """Starts two ranks of a behaviour, as nohup does, and returns the launcher once both run."""
    (tmp_path / "rank.py").write_text(RANK)
    started = [tmp_path / f"started{rank}" for rank in (0, 1)]
    launchers = []

    def start(behaviour: str, **variables: str) -> subprocess.Popen:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
        launcher = subprocess.Popen(
            ["nohup", sys.executable, "-W", "ignore", "-c", LAUNCH, behaviour],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
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
    ("behaviour", "words"),
    [("fail", ["error: learning rate is 7", "exit code 1"]), ("die", ["rank 1", "SIGKILL"])],
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


def test_a_failed_run_is_started_again_until_it_fails_twice_in_the_same_way(start):
    launcher = start("break", RESTARTS="5", MIMO_RESTART_SECONDS="0")
    _, err = launcher.communicate(timeout=HANG_SECONDS)
    assert launcher.returncode == 7
    told = [line for line in err.splitlines() if "restart" in line or "again" in line]
    assert "exit code 7 at step 3 (RuntimeError: broken); restart 1 of 5" in told[0], err
    assert "exit code 7 at step 5 (RuntimeError: broken); restart 2 of 5" in told[1]
    assert "not started again: the same failure twice, exit code 7 at step 5 (RuntimeError: broken)" in told[2]
    assert len(told) == 3


@pytest.mark.parametrize(("behaviour", "seconds"), [("follow", "30"), ("follow, stuck", "0.5")])
def test_ranks_save_and_end_when_the_launcher_is_killed(start, tmp_path, behaviour, seconds):
    launcher = start(behaviour, MIMO_GRACE_SECONDS=seconds)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + HANG_SECONDS
    while any(map(pid_runs, ranks(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all((tmp_path / f"saved{rank}").exists() == (behaviour == "follow") for rank in (0, 1))


NODE = """
import os, sys
from pathlib import Path
from mimo_train.launch.nodes import Nodes
from mimo_train.launch.torchrun import launch
node, port, restarts, command = sys.argv[1:]
nodes = Nodes(2, int(node), "localhost", int(port), max_restarts=int(restarts))
try:
    code = launch(["sh", "-c", command], nodes, 1, Path(f"run{node}"))
except ValueError as error:
    sys.exit(str(error))
sys.exit(code)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start_node(folder: Path, node: int, port: int, command: str, restarts: int = 0) -> subprocess.Popen:
    """The launcher of one of two nodes; the command of its rank is one of a shell."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", NODE, str(node), str(port), str(restarts), command],
        cwd=folder,
        env=env | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MIMO_RESTART_SECONDS": "0"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which tests in the background ignore
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_launcher_that_waits_for_one_that_has_left_is_quiet(tmp_path):
    """As at the end of a run, where the launcher with the store may be the first to leave; here it is killed. Ranks
    keep NODE_RANK's order, and torch's own warnings."""
    leave = "touch over1; echo ${TORCH_CPP_LOG_LEVEL-unset} rank $RANK of $WORLD_SIZE"
    lose = "until test -e over1; do sleep 0.05; done; sleep 1; kill -9 $PPID"
    port = free_port()
    launchers = [start_node(tmp_path, node, port, does) for node, does in enumerate((lose, leave))]
    outputs = [launcher.communicate(timeout=HANG_SECONDS)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [-signal.SIGKILL, 0], outputs
    assert outputs[1].splitlines()[1:] == ["unset rank 1 of 2"], outputs


def test_a_port_in_use_ends_node_0_with_one_line(tmp_path):
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        launcher = start_node(tmp_path, 0, port, "true")
        joins, error = launcher.communicate(timeout=HANG_SECONDS)[0].splitlines()
    assert launcher.returncode == 1
    assert "joins at MASTER_ADDR localhost" in joins
    assert f"MASTER_PORT: cannot listen on port {port} of node 0" in error


def test_nodes_start_again_together_or_not_at_all(tmp_path):
    """Node 1 fails before its run begins, so that it does not start again: node 0, which would, ends too."""
    begin = "import sys, time; from pathlib import Path; from mimo_train.flight.recorder import RECORDER as r; "
    begin += "r.open(Path('run0'), 0, 2); r.begin_step(3); r.beat(0.0); sys.exit(3)"
    port = free_port()
    commands = f'"{sys.executable}" -c "{begin}"', "sleep 1; exit 4"
    launchers = [start_node(tmp_path, node, port, does, restarts=2) for node, does in enumerate(commands)]
    outputs = [launcher.communicate(timeout=HANG_SECONDS)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [3, 4], outputs
    assert "exit code 3 at step 3; restart 1 of 2" in outputs[0] and "another node does not start" in outputs[0]


def test_a_signal_while_nodes_wait_for_each_other_ends_the_launcher(tmp_path):
    launcher = start_node(tmp_path, 0, free_port(), "true")
    assert launcher.stdout is not None and "joins" in launcher.stdout.readline()
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(HANG_SECONDS) in (-signal.SIGINT, 130)
