"""When a failed run is started again."""

import time

import pytest

from mimo_train.config.errors import UserError
from mimo_train.flight.file_format import ERROR
from mimo_train.flight.recorder import Recorder
from mimo_train.launch.exit_signal import grace_seconds
from mimo_train.launch.restarts import Failure, Restarts, first_wait, newest_failure


def test_waits_double_and_the_number_is_kept():
    restarts = Restarts(3, 5.0)
    waits = [restarts.after(Failure(1, step))[0] for step in (3, 5, 7, 9)]
    assert waits == [5.0, 10.0, 20.0, None]
    assert "3 of 3 restarts" in restarts.after(Failure(1, 11))[1]


def test_the_same_failure_twice_is_the_end():
    restarts = Restarts(9, 1.0)
    broken = Failure(1, 7, "RuntimeError: out of memory")
    assert restarts.after(Failure(-9, 7))[0] == 1.0
    assert restarts.after(broken)[0] == 2.0
    seconds, why = restarts.after(broken)
    assert seconds is None
    assert why == "not started again: the same failure twice, exit code 1 at step 7 (RuntimeError: out of memory)"


@pytest.mark.parametrize(("failure", "why"), [(Failure(1, -1), "not begun"), (Failure(16, 3), "here")])
def test_what_is_not_started_again(failure, why):
    seconds, said = Restarts(3, 1.0).after(failure)
    assert seconds is None and why in said


def test_what_failed_is_read_from_the_ranks_files(tmp_path):
    assert newest_failure(tmp_path, 1) == Failure(1, -1)
    recorder = Recorder()
    recorder.open(tmp_path, 0, 1)
    recorder.begin_step(12)
    recorder.note(ERROR, "ValueError: seven")
    assert newest_failure(tmp_path, 1) == Failure(1, 12, "ValueError: seven")
    assert newest_failure(tmp_path, 1, since=time.time() + 1000) == Failure(1, -1), "of an earlier start"


def test_wrong_values_are_told(monkeypatch):
    monkeypatch.setenv("MIMO_RESTART_SECONDS", "soon")
    with pytest.raises(UserError, match="MIMO_RESTART_SECONDS is 'soon'"):
        first_wait()
    monkeypatch.setenv("MIMO_RESTART_SECONDS", "0")
    assert first_wait() == 0.0
    monkeypatch.setenv("MIMO_GRACE_SECONDS", "0")
    with pytest.raises(UserError, match="MIMO_GRACE_SECONDS is '0': give a positive number"):
        grace_seconds()
