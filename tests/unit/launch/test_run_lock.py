"""A second run in a folder ends, and a run after one that was killed does not."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from mimo_train.config.fault import UserError
from mimo_train.launch import run_lock
from mimo_train.launch.run_lock import LOCK_FILE, RunLock

HOLD = (
    "import sys, pathlib, mimo_train.launch.run_lock as l; k = l.RunLock(pathlib.Path('.')); print(1); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-u", "-c", HOLD], cwd=tmp_path, env=environment, **pipes)
    assert process.stdout.readline() == b"1\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, holder):
    with pytest.raises(UserError, match=f"^run.dir: {tmp_path} is in use by process {holder.pid} on ") as refused:
        RunLock(tmp_path)
    written = json.loads((tmp_path / LOCK_FILE).read_text())
    assert written["host"] == socket.gethostname() and written["pid"] == holder.pid
    assert f"since {written['since']}" in str(refused.value) and "give another run.dir" in str(refused.value)


def test_a_killed_process_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.close()
    lock.close()


def test_a_lock_of_another_machine_is_waited_for(tmp_path, holder, monkeypatch):
    """Its file server may not have noticed yet that it is gone."""
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "gone", "pid": 7, "since": "then"}))
    with pytest.raises(UserError, match="in use by process 7 on gone, since then: .*remove .*lock"):
        RunLock(tmp_path, patience=0)

    def end(seconds: float) -> None:
        holder.kill()
        holder.wait()

    monkeypatch.setattr(run_lock.time, "sleep", end)
    RunLock(tmp_path, patience=1000).close()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_what_stands_in_the_file_decides_nothing(tmp_path, holder, text):
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(UserError, match="is in use by another process: "):
        RunLock(tmp_path)


def test_a_process_may_take_its_own_lock_again(tmp_path):
    """An in-process restart whose last attempt was aborted."""
    locks = [RunLock(tmp_path), RunLock(tmp_path)]
    assert [lock.close() for lock in locks] == [None, None]


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "lockf", refuse)
    RunLock(tmp_path).close()
    assert f"warning: run.dir: {tmp_path / LOCK_FILE} cannot be locked (No locks available)" in capsys.readouterr().err
