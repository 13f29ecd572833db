"""When a failed run is started again: by its launcher, and by the scheduler of its job."""

import time

import pytest

from mimo_train.cli import main
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.flight.file_format import ERROR
from mimo_train.flight.recorder import Recorder
from mimo_train.launch.exit_signal import grace_seconds
from mimo_train.launch.restarts import (
    AGAIN,
    STOPPED_CODE,
    Ended,
    Failure,
    Restarts,
    decide,
    first_wait,
    newest_failure,
    require_resume,
    stopped_code,
)
from mimo_train.logging import progress

BROKEN = "RuntimeError: broken"


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


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan"])
def test_wrong_times_are_named(monkeypatch, text):
    monkeypatch.setenv("MIMO_GRACE_SECONDS", text)
    with pytest.raises(UserError, match=f"MIMO_GRACE_SECONDS is '{text}': give a positive number"):
        grace_seconds()
    monkeypatch.setenv("MIMO_RESTART_SECONDS", text)
    if text == "0":
        assert first_wait() == 0.0
    else:
        with pytest.raises(UserError, match=f"MIMO_RESTART_SECONDS is '{text}'"):
            first_wait()


def stopped(began: int, step: int, reason: str) -> Ended:
    return Ended(began, f"{reason} after step {step}", failed=False)


def failed(began: int, step: int, error: str = "") -> Ended:
    return Ended(began, f"failure at step {step}: {error}", failed=True)


@pytest.mark.parametrize(
    ("code", "ended", "before", "again"),
    [
        (1, stopped(0, 50, "signal"), [], True),
        (1, stopped(50, 90, "signal"), [stopped(0, 50, "signal")], True),
        (1, stopped(50, 50, "signal"), [stopped(50, 50, "signal")], False),
        (1, failed(0, 7, BROKEN), [stopped(0, 5, "signal")], True),
        (1, failed(0, 7, BROKEN), [failed(0, 7, BROKEN)], False),
        (1, failed(5, 7, BROKEN), [failed(0, 7, BROKEN)], True),
        (1, failed(0, 9), [failed(0, 8)], True),
        (1, failed(0, 9), [failed(0, 7), failed(0, 8)], False),
        (1, failed(0, 9), [failed(0, 7), stopped(0, 0, "signal")], True),
        (16, stopped(0, 5, "asked by the step"), [], False),
    ],
)
def test_a_job_starts_again_but_not_for_ever(code: int, ended: Ended, before: list[Ended], again: bool):
    assert decide(code, ended, before)[0] is again


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Starts a job of the run in `tmp_path`, which goes on from a step, and ends it; returns the verdict."""
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)

    def job(number: int, code: int, *, began: int | None = 0, exited: str = "", error: str = "", step: int = 7) -> int:
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        recorder = Recorder()
        if began is not None or error:
            recorder.open(tmp_path, 0, 1)
        if began is not None:
            progress.job_started(tmp_path, world_size=1, step=began)
            recorder.begin_step(step)
        if error:
            recorder.note(ERROR, error)
        if exited:
            progress.append(tmp_path, "exit", step=step, reason=exited)
        return main(["launch", "requeue", str(code), "vlm_digits", f"run.dir={tmp_path}"])

    return job


def test_a_run_starts_again_until_it_is_finished(job):
    assert job(0, 0, exited="signal", step=5) == AGAIN
    assert job(1, 1, began=5, error=BROKEN) == AGAIN
    assert job(2, 0, began=5, exited="signal", step=9) == AGAIN
    assert job(3, 0, began=9, exited="finished", step=12) == 0


def test_the_same_failure_of_two_jobs_is_the_end(job, capsys):
    assert job(0, 137, error=BROKEN) == AGAIN
    assert job(1, 1, error=BROKEN) == 1
    assert "the same end twice, failure at step 7: RuntimeError: broken, both from step 0" in capsys.readouterr().err


def test_a_failure_in_set_up_counts_and_one_before_the_run_began_is_the_end(job, capsys):
    assert job(0, 1, began=None, error="RuntimeError: no network") == AGAIN
    assert job(1, 1, began=None, error="RuntimeError: no network") == 1
    assert job(2, 7, began=None) == 7, "a fault of the config"
    assert "had not begun" in capsys.readouterr().err


def test_a_run_that_an_earlier_job_has_finished_is_not_finished_by_this_one(job):
    assert job(0, 0, exited="finished") == 0
    assert job(10, 1, began=None) == 1, "with more steps, and a fault"


def test_a_job_that_failed_after_its_last_step_is_done(job):
    assert job(0, 1, exited="finished") == 0


def test_a_run_that_starts_again_must_continue(monkeypatch):
    monkeypatch.setenv(STOPPED_CODE, "0")
    require_resume("auto")
    with pytest.raises(ConfigError, match="checkpoint.resume: must be auto with MIMO_STOPPED_CODE 0, got 'never'"):
        require_resume("never")


def test_the_exit_code_of_a_stop(monkeypatch):
    monkeypatch.delenv(STOPPED_CODE, raising=False)
    assert stopped_code() == 0
    monkeypatch.setenv(STOPPED_CODE, "75")
    assert stopped_code() == 75
    assert Restarts(3, 1.0).after(Failure(75, 7))[0] is None
    monkeypatch.setenv(STOPPED_CODE, "256")
    with pytest.raises(UserError, match="MIMO_STOPPED_CODE is '256'"):
        stopped_code()
