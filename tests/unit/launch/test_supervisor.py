"""What a killed launcher leaves: no ranks, also stopped ones, and no temporary files."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mimo_train.flight.processes import process, runs
from mimo_train.launch import temp_dir
from mimo_train.launch.supervisor import main
from tests.hang import HANG_SECONDS


def test_ranks_of_a_launcher_that_is_gone_are_ended_after_the_grace(tmp_path):
    sleeps = [sys.executable, "-c", "import time; time.sleep(1000)"]
    ranks = [subprocess.Popen(sleeps, start_new_session=own) for own in (True, False)]
    os.kill(ranks[0].pid, signal.SIGSTOP)
    folder = tmp_path / "mimo-train-x"
    folder.mkdir()
    lines = [f"start {rank.pid} {process(rank.pid).start}\n" for rank in ranks]
    main(0.3, folder, lines)
    assert [rank.wait(HANG_SECONDS) for rank in ranks] == [-signal.SIGKILL] * 2
    assert not folder.exists()


def test_ranks_of_a_launcher_that_has_said_so_are_left_alone(tmp_path):
    own = process(os.getpid())
    main(0.0, tmp_path, [f"start {os.getpid()} {own.start}\n", "done\n"])
    assert tmp_path.exists() and runs(os.getpid(), own.start)


HOLDER = """
import sys, time
from mimo_train.launch.temp_dir import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(1000)
"""


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mimo-train-of-something-else").mkdir()
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    theirs = Path(held.stdout.readline().strip())
    assert theirs.parent == tmp_path
    with temp_dir.scratch_folder() as own:
        assert theirs.exists() and own.exists()  # it lives
    assert not own.exists()
    held.kill()
    held.communicate()
    with temp_dir.scratch_folder():
        deadline = time.monotonic() + HANG_SECONDS
        while theirs.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not theirs.exists()
    assert (tmp_path / "mimo-train-of-something-else").exists()
