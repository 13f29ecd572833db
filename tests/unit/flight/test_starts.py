"""Several starts of one command, whose files may lie in one folder; here all ranks are this process."""

import os
import subprocess
import sys
import time

import pytest

from mimo_train.flight import watchdog
from mimo_train.flight.blame import look
from mimo_train.flight.file_format import REPORT
from mimo_train.flight.read import process, read_ranks
from mimo_train.flight.recorder import Recorder, _start_name


@pytest.fixture(autouse=True)
def torchrun(monkeypatch):
    """What plain torchrun sets on several nodes, the same at each start."""
    given = {
        "MASTER_ADDR": "node",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def earlier_start(run_dir, size: int, ago: float = 60.0) -> list[Recorder]:
    """The files of a start whose ranks have died."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        found = process(child.pid)
    assert found is not None
    ranks = [Recorder() for _ in range(size)]
    for number, recorder in enumerate(ranks):
        folder = recorder.open(run_dir, number, size)
        recorder.record.pid, recorder.record.start = child.pid, found.start
        recorder.record.beat_at -= ago
    (folder / REPORT).write_text("of the start before")
    os.utime(folder / REPORT, (time.time() - ago, time.time() - ago))
    return ranks


def test_the_run_id_is_in_the_name_however_long_it_is(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node" * 60)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    before = _start_name()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert _start_name() != before and len(before) == 120


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_an_earlier_start_are_not_blamed(tmp_path, size):
    before = earlier_start(tmp_path, size)
    ranks = [Recorder() for _ in range(3)]
    for number in (1, 2):  # the first has not begun, and has removed nothing
        ranks[number].open(tmp_path, number, 3)

    def meanwhile(_seconds: float) -> None:
        for number in (1, 2):
            ranks[number].tick()
            ranks[number].beat(time.monotonic())

    verdict = look(before[0].folder, meanwhile, ranks[1].opened)
    assert [*verdict.ranks] == [1, 2] and verdict.world_size == 3
    assert verdict.blamed == []


def test_ranks_of_another_size_are_of_another_start(tmp_path):
    before = earlier_start(tmp_path, 5)
    now = Recorder()
    now.open(tmp_path, 2, 3)
    assert [*read_ranks(before[0].folder)] == [2]


def test_a_report_of_an_earlier_start_does_not_count(tmp_path):
    before = earlier_start(tmp_path, 5)
    recorder = Recorder()
    folder = recorder.open(tmp_path, 4, 5)
    assert folder == before[0].folder
    one = watchdog.Watch(recorder, tmp_path, 0, launched=False)
    one.close()
    assert not one._is_reported(folder / REPORT)
    assert one._is_first(folder / REPORT) and one._is_reported(folder / REPORT)
    assert not one._is_first(folder / REPORT)
