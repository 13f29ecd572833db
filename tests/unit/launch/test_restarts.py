"""When a failed run is started again."""

import signal
from types import SimpleNamespace

import pytest

from mimo_train.config.errors import ConfigError, UserError
from mimo_train.flight.layout import ERROR
from mimo_train.flight.recorder import Recorder
from mimo_train.launch.restarts import RESTARTS, Failure, Restarts, failure_of, first_wait, require_resume, run_dir_of
from mimo_train.launch.shutdown import grace_seconds
from mimo_train.launch.temp_dir import FLIGHT
from mimo_train.launch.torchrun import _report


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
    assert failure_of(1, tmp_path) == Failure(1, -1)
    recorder = Recorder()
    folder = recorder.open(tmp_path / "run", 0, 1)
    recorder.begin_step(12)
    recorder.note(ERROR, "ValueError: seven")
    (tmp_path / FLIGHT).write_text(str(folder))
    assert failure_of(1, tmp_path) == Failure(1, 12, "ValueError: seven")
    assert run_dir_of(tmp_path) == tmp_path / "run"


def test_a_rank_that_was_aborted_points_to_the_command_that_compares_collectives(tmp_path, capsys):
    failures = {1: SimpleNamespace(exitcode=-signal.SIGABRT, pid=7, timestamp=1)}
    ranks = SimpleNamespace(ended={}, stop_asked=False)
    assert _report(failures, ranks, tmp_path) == 1
    (tmp_path / FLIGHT).write_text(f"{tmp_path}/a run/flight/start")
    assert _report(failures, ranks, tmp_path) == 1
    without, known = capsys.readouterr().err.splitlines()
    assert without.startswith("mimo-train: rank 1 (process 7) was killed by SIGABRT (as gloo does where ranks make")
    assert "mimo-train hang RUN_DIR compares" in without and f"mimo-train hang '{tmp_path}/a run' compares" in known


def test_wrong_values_are_told(monkeypatch):
    monkeypatch.setenv("MIMO_RESTART_SECONDS", "soon")
    with pytest.raises(UserError, match="MIMO_RESTART_SECONDS is 'soon'"):
        first_wait()
    monkeypatch.setenv("MIMO_RESTART_SECONDS", "0")
    assert first_wait() == 0.0
    monkeypatch.setenv("MIMO_GRACE_SECONDS", "0")
    with pytest.raises(UserError, match="MIMO_GRACE_SECONDS is '0': give a positive number"):
        grace_seconds()
    require_resume("never")
    monkeypatch.setenv(RESTARTS, "2")
    require_resume("auto")
    with pytest.raises(ConfigError, match="checkpoint.resume: must be auto with --max-restarts 2, is 'never'"):
        require_resume("never")
