"""What one rank says to those that wait for data."""

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from mimo_train.training import shutdown
from mimo_train.training.shutdown import StopFlag


def test_a_flag_reaches_the_others_and_is_of_one_life(monkeypatch):
    monkeypatch.setattr(shutdown, "_PAUSE", 0.0)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    one, other, later = (StopFlag(dist.PrefixStore(f"life_{life}", store)) for life in (0, 0, 1))
    assert not other.is_set()
    one.set()
    one.set()
    assert other.is_set() and one.is_set() and not later.is_set()


def test_the_store_is_not_asked_all_the_time():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    one, other = StopFlag(store), StopFlag(store)
    assert not other.is_set()
    one.set()
    assert not other.is_set(), "the pause is longer than this test"


def test_where_nobody_can_be_told_nothing_fails():
    one = StopFlag(dist.HashStore())
    one.set()
    assert one.is_set() in (True, False)

    gone = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", gone.port, is_master=False, wait_for_workers=False)
    flag = StopFlag(client)
    assert not flag.is_set()
    del gone
    flag.set()
    assert not flag.is_set()


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("opened", [False, True], ids=["not opened yet", "opened"])
def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch, opened):
    monkeypatch.setattr(shutdown, "_PAUSE", 0.0)
    monkeypatch.setattr(shutdown, "_PATIENCE", 0.2)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        store = dist.TCPStore("localhost", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
        flag = StopFlag(store)
        if opened:
            monkeypatch.setattr(shutdown, "_PATIENCE", 20.0)
            flag.set()
            assert flag.is_set()
            monkeypatch.setattr(shutdown, "_PATIENCE", 0.2)
        os.kill(server.pid, signal.SIGSTOP)
        assert not flag.is_set()
        flag.set()
        assert not flag.is_set()
    finally:
        server.kill()
        server.wait()
