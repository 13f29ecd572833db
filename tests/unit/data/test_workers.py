"""Threads that read for a process, waits that are given up, and processes that end with the one that they work for."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

import data.workers
from data.errors import DataError
from data.loader import StepLoader
from data.order.step import Batching, Reader
from data.samples.shard_dataset import ShardDataset
from data.storage import object_store
from data.text.tokens import build_tokenizer
from data.workers import ReadingThreads, Wait, WaitGivenUp, never, still_reading, worker_processes
from tests.hang import HANG_SECONDS
from tests.http_server import serving
from tests.unit.data.helpers import images

BATCHING = Batching(2, 2)
READERS = [Reader("language", 0, 1), Reader("images", 0, 1)]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Waits look early, so that tests take no half seconds."""
    monkeypatch.setattr(data.workers, "LOOK_SECONDS", 0.05)


def test_a_server_that_stands_still_is_given_up_and_nobody_waits_for_the_threads(small, monkeypatch):
    monkeypatch.setattr(object_store, "IO", object_store.IoThread(patience=HANG_SECONDS))
    names = ("a-000000.tar", "a-000001.tar")
    media = (images(),)
    with serving({name: (small / name).read_bytes() for name in names}) as server:
        tokenizer = build_tokenizer("bytes", [item.placeholder for item in media])
        shards = [server.url("now", name) for name in names]
        dataset = ShardDataset(shards, tokenizer=tokenizer, media=media, sequence_length=24, read_retries=0)
        server.stands_still.add("now")  # from here on: the index was read
        loader = StepLoader(dataset, BATCHING, READERS, limit=3, gives_up=lambda: True)
        with pytest.raises(WaitGivenUp):
            next(loader)
        assert still_reading(), "a thread waits for the server, and this one has gone on"
        with pytest.raises(RuntimeError, match="closed"):
            next(loader)
        loader.close()
    wait_for_threads()


def wait_for_threads():
    """Until no test that follows sees those of this one."""
    deadline = time.monotonic() + HANG_SECONDS
    while still_reading():
        assert time.monotonic() < deadline, "threads are left"
        time.sleep(0.01)


def test_a_slow_reader_is_given_up(dataset, monkeypatch):
    slow, entered, held = dataset(), threading.Event(), threading.Event()
    read = slow.read_text

    def read_text(number):
        if number == 3:
            entered.set()
            assert held.wait(HANG_SECONDS)
        return read(number)

    monkeypatch.setattr(slow, "read_text", read_text)
    loader = StepLoader(slow, BATCHING, READERS, workers=2, limit=3, gives_up=entered.is_set)
    assert next(loader).first_sample == 0
    with pytest.raises(WaitGivenUp):
        next(loader)
    held.set()
    wait_for_threads()


def test_a_loader_that_is_closed_leaves_a_reader_that_hangs_behind(dataset, monkeypatch):
    monkeypatch.setattr("data.workers._PATIENCE", 0.05)
    slow, entered, held = dataset(), threading.Event(), threading.Event()
    monkeypatch.setattr(slow, "read_text", lambda number: entered.set() or held.wait(HANG_SECONDS))
    loader = StepLoader(slow, BATCHING, READERS, workers=1, limit=3)
    loader._issue_to(1)
    assert entered.wait(HANG_SECONDS)
    loader.close()
    loader.close()
    assert still_reading()
    held.set()
    wait_for_threads()


PROGRAM = """
import threading, time
from data import workers
workers._PATIENCE = {patience}
reading, entered = workers.ReadingThreads(1), threading.Event()
reading.submit(lambda: entered.set() or {read} or print("read to its end", flush=True))
entered.wait()
"""


@pytest.mark.parametrize(
    ("read", "patience", "printed"),
    [("threading.Event().wait()", 0.1, ""), ("time.sleep(0.2)", HANG_SECONDS, "read to its end\n")],
)
def test_a_program_ends_though_a_reader_hangs_and_not_while_one_reads(read, patience, printed):
    program = [sys.executable, "-c", PROGRAM.format(read=read, patience=patience)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_threads_that_nobody_knows_any_more_end():
    reading = ReadingThreads(2)
    assert [reading.submit(pow, 2, power).result() for power in range(5)] == [1, 2, 4, 8, 16]
    assert isinstance(reading.submit(int, "x").exception(), ValueError)
    assert still_reading()
    del reading
    wait_for_threads()


def test_a_slow_reader_in_the_callers_thread_is_given_up_between_two_reads(dataset, monkeypatch):
    slow, numbers = dataset(), []

    def read_text(number):
        numbers.append(number)
        time.sleep(0.1)  # longer than the time after which a wait looks
        return original(number)

    original = slow.read_text
    monkeypatch.setattr(slow, "read_text", read_text)
    loader = StepLoader(slow, BATCHING, READERS, workers=0, limit=3, gives_up=lambda: True)
    with pytest.raises(WaitGivenUp):
        next(loader)
    assert numbers in ([0], []), "none where the machine is so slow that the wait ends before the first"


def test_an_error_of_the_work_is_no_end_of_a_wait():
    """Also one of the kind that a wait which lasts too long raises."""
    late: Future[int] = Future()
    timer = threading.Timer(0.2, late.set_exception, [TimeoutError("of the work")])
    timer.start()
    with pytest.raises(TimeoutError, match="of the work"):
        Wait(never).result_of(late)
    there: Future[int] = Future()
    there.set_result(7)
    assert Wait(lambda: True).result_of(there) == 7


STARTS_TWO = """
import time
from data.workers import worker_processes

if __name__ == "__main__":
    with worker_processes(2) as pool:
        jobs = [pool.submit(time.sleep, 0.2) for _ in range(2)]
        [job.result() for job in jobs]
        print("begun", flush=True)
        time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_one_that_they_work_for(number, tmp_path):
    (tmp_path / "starts_two.py").write_text(STARTS_TWO)
    command = [sys.executable, tmp_path / "starts_two.py"]
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    # The pipe is at its end when the last process that has it is gone.
    assert process.communicate(timeout=HANG_SECONDS)[0] == ""


def test_a_killed_one_is_named():
    with pytest.raises(DataError, match="one of 2 processes .* was killed"), worker_processes(2) as pool:
        pool.submit(os._exit, 1).result()


def test_each_begins_as_it_is_told():
    with worker_processes(1, os.putenv, "BEGUN", "yes") as pool:
        assert pool.submit(os.system, 'test "$BEGUN" = yes').result() == 0
