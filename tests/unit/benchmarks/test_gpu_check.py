"""The parts of scripts/gpu_check.sh: jobs that fail or hang, and what is said of them. tests/e2e runs it as a whole."""

import math
import time

import pytest

from benchmarks.gpu_check import checks
from benchmarks.gpu_check.jobs import Jobs, Outcome
from tests.e2e.fake_python import pid_runs
from tests.hang import HANG_SECONDS
from tests.unit.benchmarks import gpu_check_jobs as bad


@pytest.fixture(scope="module")
def jobs():
    with Jobs(600) as jobs:
        yield jobs


def test_a_job_is_forked_from_a_process_that_has_the_imports(jobs):
    assert jobs.run(bad.add, HANG_SECONDS, one=2, other=3) == Outcome("ok", 5)
    assert jobs.run(bad.has_torch, HANG_SECONDS).value[0] is True
    assert jobs.run_alone(bad.has_torch, HANG_SECONDS).value == [False, True]


def test_a_job_on_cuda_begins_anew_where_a_fork_could_not_use_the_device(jobs):
    """Without a driver NVML is not there to ask, and the imports have asked CUDA."""
    assert jobs.run(bad.has_torch, HANG_SECONDS, device="cuda").value[1] is True


def test_a_traceback_ends_in_its_last_lines(jobs):
    found = jobs.run(bad.boom, HANG_SECONDS)
    assert found.state == "failed"
    assert found.text.splitlines()[-1] == "RuntimeError: broken on purpose"
    assert 'File "tests/unit/benchmarks/gpu_check_jobs.py"' in found.text, "a short path"


def test_what_is_missing_is_no_failure(jobs):
    assert jobs.run(bad.miss, HANG_SECONDS) == Outcome("skipped", text="not installed: nothing-like-it")


def test_a_job_that_dies_leaves_its_last_words(jobs):
    for run in (jobs.run, jobs.run_alone):
        assert run(bad.die, HANG_SECONDS) == Outcome("failed", text="its last words\nended by SIGKILL")


def test_a_job_that_hangs_is_ended_with_its_children_and_the_next_one_runs(jobs, tmp_path):
    pids = tmp_path / "pids"
    for seconds in (5, 60, HANG_SECONDS):  # on a busy machine it is not waiting yet when its time is over
        found = jobs.run(bad.hang, seconds, pid_file=str(pids))
        assert found.state == "ended"
        if "waits for nothing" in found.text:
            break
    assert found.text == f"after {seconds} s; its last words:\nwaits for nothing"
    while any(pid_runs(int(pid)) for pid in pids.read_text().rstrip(".").split()):
        time.sleep(0.05)
    assert jobs.run(bad.add, HANG_SECONDS, one=1, other=1).value == 2


def test_the_time_of_all_jobs_ends_them():
    with Jobs(0) as jobs:
        for found in (jobs.run(bad.add, HANG_SECONDS, one=2, other=3), jobs.command(["true"], HANG_SECONDS)):
            assert (found.state, found.text) == ("ended", "not run: the 0 s for all checks are over")


def lines_of(jobs, name: str, **of_machine) -> list[checks.Line]:
    found = checks.Checks(jobs, "cpu" if not of_machine else "cuda")
    value = {"torch": "2", "gpus": [{"memory": 139.0}]} | of_machine
    found.machine = Outcome("ok", value)
    return list(found.run(name))


def test_without_torch_or_a_device_every_check_says_so(jobs):
    for name in checks.CHECKS.keys() - {"device"}:
        assert [line.result for line in lines_of(jobs, name, gpus=[])] == ["no CUDA device"]
        assert [line.result for line in lines_of(jobs, name, torch=None)] == ["not installed: torch"]


@pytest.mark.parametrize(
    ("losses", "options", "graphs", "state", "words"),
    [
        ([2.0, 1.0005], {}, 0, "ok", "5.0e-04 of losses"),
        ([2.0, 1.0020], {}, 0, "failed", "MORE THAN 0.001"),
        ([2.0, math.nan], {}, 0, "failed", "MORE THAN 0.001"),
        ([2.0, 1.0], {"compiled": True}, 0, "failed", "NOTHING WAS COMPILED"),
        ([2.0, 1.0], {"compiled": True}, 3, "ok", "3 graphs compiled"),
    ],
)
def test_losses_are_held_to_the_bound(losses, options, graphs, state, words):
    reference = {"losses": [2.0, 1.0], "norms": [1.0, 1.0]}
    value = {"losses": losses, "norms": [1.0, 1.0], "graphs": graphs, "te_modules": 0, "backend": "cuda:nccl"}
    line = checks._compared("run", reference, Outcome("ok", value), 1e-3, options)
    assert line.state == state and words in line.result
