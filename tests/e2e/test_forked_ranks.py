"""Ranks that are forked find what those find that are processes of their own, and what cannot be forked is not."""

import json
import os
import signal
import subprocess
import sys

import pytest

from mimo_train.launch import forked
from mimo_train.launch.forked import open_server
from tests.hang import HANG_SECONDS

RANK = """
import atexit, json, os, signal, sys, threading, time
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
files = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
given = {name for name in os.environ if name.startswith(("MIMO", "TORCHELASTIC", "LOCAL", "GROUP", "ROLE"))}
found = {
    "arguments": sys.argv[1:],
    "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "handlers": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if number < 32},
    "blocked": [*blocked],
    "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
    "launcher's": str(os.getppid()) == os.environ["MIMO_LAUNCHER"].partition(":")[0],
    "files": sorted(files),
    "unbuffered": sys.stdout.write_through,
    "ranks": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")],
    "variables": sorted(given),
    "threads": len(os.listdir("/proc/self/task")),
    "folder": os.getcwd(),
}
def write():
    open("written", "w").write(json.dumps(found))
    os.replace("written", f"{os.environ['RANK']}.json")
while os.environ["RANK"] == "1" and not os.path.exists("0.json"):  # the failure of this one ends the other
    time.sleep(0.01)
atexit.register(write)
threading.Thread(target=lambda: (time.sleep(0.2), found.update(waited=True))).start()
sys.exit("the last word" if os.environ["RANK"] == "1" else None)
"""
FORKED = """
import sys
from mimo_train.launch import forked, torchrun
forked.PROGRAM = "json"
sys.exit(torchrun.main(["--forked=cpu", *sys.argv[1:]]))
"""


def found_by_ranks(folder, *program: str) -> list[dict]:
    """What each of two ranks finds, the second of which fails."""
    (folder / "rank.py").write_text(RANK)
    options = ["--standalone", "--nproc-per-node=2", "-m", "rank", "a", "b c"]
    with open(os.devnull) as inherited:  # by the launcher, and not by its ranks
        os.set_inheritable(inherited.fileno(), True)
        done = subprocess.run(
            [sys.executable, "-u", *program, *options],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            pass_fds=[inherited.fileno()],
            preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_IGN),  # as `nohup` does
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[0] == "the last word" and "exit code 1" in done.stderr, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_a_forked_rank_finds_what_one_of_its_own_process_finds(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "forked").mkdir()
    own = found_by_ranks(tmp_path / "own", "-m", "mimo_train.launch.torchrun")
    found = found_by_ranks(tmp_path / "forked", "-c", FORKED)
    for rank in (0, 1):
        assert own[rank].pop("folder") != found[rank].pop("folder")
        assert own[rank] == found[rank]
    assert found[0]["launcher's"] and found[0]["waited"] and found[0]["arguments"] == ["a", "b c"]


SERVER = """
import os, signal, sys
from mimo_train.launch import forked
forked.PROGRAM = "json"
server = forked.open_server("auto")
for code in (0, 3):
    rank = server.start(forked.Start("rank", [str(code)], dict(os.environ), (None, sys.argv[1])))
    assert rank.wait(60) == rank.poll() == code
rank = server.start(forked.Start("rank", ["0"], dict(os.environ), ("/no/such/file", None)))
assert rank.wait(60) == 1
rank = server.start(forked.Start("rank", ["wait"], dict(os.environ), (None, None)))
os.killpg(rank.pid, 0)  # it leads its session already
try:
    rank.wait(0.01)
except forked.subprocess.TimeoutExpired:
    pass
else:
    raise AssertionError
os.kill(server._process.pid, signal.SIGKILL)
assert rank.poll() is None  # its parent is this process
os.kill(rank.pid, signal.SIGTERM)
assert rank.wait(60) == -signal.SIGTERM
assert server.start(forked.Start("rank", ["0"], dict(os.environ), (None, None))) is None
server.close()
"""
STOPPED = """
import os, signal
from mimo_train.launch import forked
forked.PROGRAM, forked.ANSWER_SECONDS = "json", 0.5
for asked in (True, False):
    server = forked.open_server("auto")
    os.kill(server._process.pid, signal.SIGSTOP)
    if asked:
        for _ in range(2):
            assert server.start(forked.Start("rank", ["0"], dict(os.environ), (None, None))) is None
    server.close()
    assert server._process.poll() == -signal.SIGKILL
# A rank that the launcher gives up while it starts does not run.
forked.ANSWER_SECONDS = 60
server = forked.open_server("auto")
with forked._adopting():
    server._connection.send(forked.Start("rank", ["0"], dict(os.environ), (None, None)))
    pid = server._connection.recv()
server._end(0)
assert forked.ForkedRank(pid, "rank").wait(60) == 1
"""


def test_a_server_that_does_not_answer_is_ended(tmp_path):
    (tmp_path / "rank.py").write_text("print('ran')")
    done = subprocess.run(
        [sys.executable, "-c", STOPPED],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_ranks_end_as_children_of_the_launcher_whatever_becomes_of_the_server(tmp_path):
    (tmp_path / "rank.py").write_text(
        "import sys, time\nif sys.argv[1] == 'wait':\n    time.sleep(600)\n"
        "print('said', file=sys.stderr)\nsys.exit(int(sys.argv[1]))\n"
    )
    said = tmp_path / "said"
    said.touch()
    done = subprocess.run(
        [sys.executable, "-u", "-c", SERVER, str(said)],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    assert said.read_text() == "said\nsaid\n"


@pytest.mark.parametrize(
    ("program", "device", "cuda", "threads"),
    [("no_such_module", "cpu", False, 1), ("json", "auto", True, 1), ("json", "cpu", False, 2)],
    ids=["the program cannot be imported", "there is CUDA", "there are threads"],
)
def test_what_cannot_be_forked_is_not(monkeypatch, program, device, cuda, threads):
    def fork() -> int:
        raise AssertionError("forked")

    monkeypatch.setattr(forked, "PROGRAM", program)
    monkeypatch.setattr(forked, "_has_cuda", lambda: cuda)
    monkeypatch.setattr(forked.threading, "active_count", lambda: threads)
    monkeypatch.setattr(forked.os, "fork", fork)
    assert open_server(device) is None


@pytest.mark.parametrize(
    "command",
    [
        ["numactl", "-N", "0", sys.executable, "-u", "-m", "mimo_train.cli"],
        [sys.executable, "-u", "train.py"],
        [sys.executable, "-X", "importtime", "-m", "mimo_train.cli"],
        ["/usr/bin/python3.99", "-m", "mimo_train.cli"],
    ],
)
def test_another_command_is_no_forked_rank(command):
    assert forked._start_of(command, {}, (None, None)) is None
    own = forked._start_of([sys.executable, "-m", "mimo_train.cli", "train", "x"], {"RANK": "1"}, (None, None))
    assert own == forked.Start("mimo_train.cli", ["train", "x"], {"RANK": "1"}, (None, None))
