"""A second run in a folder ends, and a run after one that was killed does not."""

import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mimo_train.config.errors import UserError
from mimo_train.launch import run_lock
from mimo_train.launch.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys, pathlib, mimo_train.launch.run_lock as l
def refuse(*_): raise OSError(37, "No locks available")
if sys.argv[1] < "0": l.fcntl.flock = refuse
k = l.RunLock(pathlib.Path('.'), beat=abs(float(sys.argv[1]))); print(1); sys.stdin.read()
"""


@pytest.fixture(params=[10.0])
def holder(request, tmp_path):
    """A process that holds the lock of `tmp_path`; the parameter is the seconds between its heartbeats, negative
    where the file system knows no locks."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", HOLD, str(request.param)], cwd=tmp_path, env=environment, **pipes
    )
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
    assert (tmp_path / LOCK_FILE).read_text() == "", "nothing to wait for"


def test_a_lock_of_another_machine_is_waited_for(tmp_path, holder, monkeypatch):
    """Its file server may not have noticed yet that it is gone."""
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": "gone", "pid": 7, "since": "then"}))
    with pytest.raises(UserError, match="in use by process 7 on gone, since then: .*remove .*lock"):
        RunLock(tmp_path, patience=0)

    def end(seconds: float) -> None:
        holder.kill()
        holder.wait()

    monkeypatch.setattr(run_lock.time, "sleep", end)
    RunLock(tmp_path, patience=1000, beat=0.01).close()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_what_stands_in_the_file_decides_nothing(tmp_path, holder, text):
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(UserError, match="is in use by another process: "):
        RunLock(tmp_path)


def test_a_second_lock_of_the_same_process_is_refused_until_the_first_is_closed_or_dropped(tmp_path):
    """Dropped as by an in-process restart whose last attempt was aborted. Reading the file frees nothing."""
    lock = RunLock(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            RunLock(tmp_path)
        (tmp_path / LOCK_FILE).read_text()
    lock.close()
    lock = RunLock(tmp_path, beat=1000)
    del lock
    gc.collect()
    RunLock(tmp_path).close()


def test_a_forked_process_does_not_keep_a_closed_lock(tmp_path):
    lock = RunLock(tmp_path)
    inherited = os.dup(lock._file.fileno())  # as a fork has it
    lock.close()
    RunLock(tmp_path).close()
    os.close(inherited)


def written_by(host: str, beat: int) -> str:
    return json.dumps({"host": host, "pid": 7, "since": "then", "beat": beat})


def test_a_holder_that_shows_signs_of_life_is_believed_where_a_lock_is_not(tmp_path, monkeypatch):
    """A file system that knows locks on one machine alone gives every machine the same one."""
    (tmp_path / LOCK_FILE).write_text(written_by("elsewhere", 1))
    beats = iter(range(2, 1000))
    monkeypatch.setattr(
        run_lock.time, "sleep", lambda _: (tmp_path / LOCK_FILE).write_text(written_by("elsewhere", next(beats)))
    )
    with pytest.raises(UserError, match="in use by process 7 on elsewhere, since then"):
        RunLock(tmp_path, beat=1000)


def test_a_holder_on_another_machine_that_stands_still_is_taken_over(tmp_path):
    (tmp_path / LOCK_FILE).write_text(written_by("elsewhere", 1))
    RunLock(tmp_path, beat=0.02).close()


def test_a_holder_shows_signs_of_life_and_learns_that_it_was_taken_over(tmp_path):
    lost, came = [], threading.Event()
    lock = RunLock(tmp_path, mark="ours", beat=0.02, on_lost=lambda why: (lost.append(why), came.set()))
    first = json.loads((tmp_path / LOCK_FILE).read_text() or "{}").get("beat", 0)
    while json.loads((tmp_path / LOCK_FILE).read_text() or "{}").get("beat", 0) <= first + 1:
        pass
    deadline = time.monotonic() + 60
    while not came.wait(0.05) and time.monotonic() < deadline:  # a heartbeat that was under way is written over it
        (tmp_path / LOCK_FILE).write_text(written_by("elsewhere", 1))
    assert came.is_set() and "is in use by process 7 on elsewhere" in lost[0]
    lock.close()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "elsewhere"  # theirs is left alone


@pytest.mark.parametrize("holder", [0.1], indirect=True)
def test_a_removed_file_is_put_back(tmp_path, holder):
    (tmp_path / LOCK_FILE).unlink()
    while not ((tmp_path / LOCK_FILE).exists() and (tmp_path / LOCK_FILE).stat().st_size):
        time.sleep(0.01)
    with pytest.raises(UserError, match=f"is in use by process {holder.pid} on "):
        RunLock(tmp_path)


def test_a_run_ends_where_another_has_the_place_of_its_removed_file(tmp_path):
    lost, came = [], threading.Event()
    lock = RunLock(tmp_path, beat=0.02, on_lost=lambda why: (lost.append(why), came.set()))
    (tmp_path / "new").write_text(written_by("elsewhere", 1))
    (tmp_path / "new").replace(tmp_path / LOCK_FILE)
    assert came.wait(60) and "is in use by process 7 on elsewhere" in lost[0]
    lock.close()


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)


@pytest.mark.parametrize("holder", [-0.05], indirect=True)
def test_of_two_processes_without_locks_the_second_is_refused_and_takes_over_a_dead_one(tmp_path, no_locks, holder):
    with pytest.raises(UserError, match=f"is in use by process {holder.pid} on "):
        RunLock(tmp_path, beat=1000)  # the patience is BEATS_MISSED times that
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path, beat=0.05)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.close()


def test_a_file_system_without_locks_is_reported(tmp_path, no_locks, capsys):
    RunLock(tmp_path).close()
    assert f"warning: run.dir: {tmp_path / LOCK_FILE} cannot be locked (No locks available)" in capsys.readouterr().err
