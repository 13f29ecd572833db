"""`mimo-train hang`: its exit codes, which scripts rely on."""

import os
import re
import time

import pytest

from mimo_train.cli import main
from mimo_train.flight import blame
from mimo_train.flight.file_format import REPORT
from mimo_train.flight.read import GONE, STOPPED, newest_start, read_ranks
from tests.unit.flight.test_starts import earlier_start


def test_the_exit_code_says_whether_somebody_is_to_blame(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(blame, "PAUSE", 0.0)
    ranks = earlier_start(tmp_path, 2)
    assert main(["hang", str(tmp_path)]) == 3
    assert "to blame: " in capsys.readouterr().out
    for rank in ranks:
        rank.to("end")
    assert main(["hang", str(tmp_path)]) == 0
    assert "nobody is to blame" in capsys.readouterr().out
    assert main(["hang", str(tmp_path / "none")]) == 1, "not 0: nothing is known"
    assert "to blame" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        main(["hang", "--help"])
    assert raised.value.code == 0 and "Exit code 0 if nobody is to blame, 3 if a rank is" in capsys.readouterr().out


def test_what_the_watchdog_found_is_said_of_the_dead_run_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(blame, "PAUSE", 0.0)
    ranks = earlier_start(tmp_path, 2)
    found = newest_start(tmp_path) / REPORT
    text = "to blame: rank 1 is stopped; rank 0 waits for it\n"
    found.write_text(text)
    assert main(["hang", str(tmp_path)]) == 3
    assert "its watchdog (" not in capsys.readouterr().out, "it has not ended the run, which has died of something else"
    found.write_text(f"{text}{blame.ENDED}\n")
    assert main(["hang", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert "the run hung, and its watchdog" in said and said.endswith("\n" + text)
    os.utime(found, (1.0, 1.0))
    assert main(["hang", str(tmp_path)]) == 3
    assert "its watchdog (" not in capsys.readouterr().out, "it is of an earlier start of the same name"
    found.write_text(f"{text}{blame.ENDED}\n")
    for rank in ranks:
        rank.to("end")
    assert main(["hang", str(tmp_path)]) == 0, "it went on, by a restart inside of its processes"


def test_a_stopped_rank_is_counted_since_it_stopped(tmp_path):
    """Not from its last heartbeat, which would be as long ago whenever one looks."""
    (rank,) = earlier_start(tmp_path, 1, ago=0.0)
    rank.to("loop")
    stopped = read_ranks(newest_start(tmp_path))[0]
    since = time.monotonic() - 40
    stopped.stack[0].at, stopped.beat_at = since, since + 1
    assert re.search(r"loop, for 4\d\.\d s, stopped since \d\d:\d\d:\d\d", blame._doing(stopped, STOPPED))
    assert re.search(r"loop, for 1\.0 s, last seen at", blame._doing(stopped, GONE))


def test_a_folder_without_files_says_which_one_may_be_meant(tmp_path, capsys):
    assert main(["hang", str(tmp_path)]) == 1
    assert "is it the run.dir of a run?" in capsys.readouterr().err
    earlier_start(tmp_path / "mine", 1)
    assert main(["hang", str(tmp_path)]) == 1
    assert f"there are runs in it: give {tmp_path / 'mine'}\n" in capsys.readouterr().err
