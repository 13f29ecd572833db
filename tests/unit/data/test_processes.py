"""Processes that work for another one end with it, and one that is killed is no mystery."""

import os
import signal
import subprocess
import sys

import pytest

from data.errors import DataError
from data.workers import worker_processes
from tests.hang import HANG_SECONDS

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
