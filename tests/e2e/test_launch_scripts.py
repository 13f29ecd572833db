"""scripts/train_vlm.sh, train_gpt.sh and the SLURM script: what they start, with which arguments, and what they refuse.
Nodes and processes are in tests/unit/launch/test_start.py."""

import pytest

from tests.e2e.fake_python import Checkout

SRUN = """#!/bin/sh
# Notes each call; the second says whether the job starts again.
echo "srun $*" >> "$FAKE_CALLS"
case "$*" in *requeue.sh*) exit "$FAKE_VERDICT" ;; *) exit "${FAKE_CODE:-0}" ;; esac
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >> "$FAKE_CALLS"
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout whose environment notes how it is called, on a cluster with a SLURM of one job."""
    checkout = Checkout(tmp_path_factory.mktemp("launch"), "flock")
    checkout.program("python3.12")
    checkout.program("srun", SRUN)
    checkout.program("scontrol", SCONTROL)
    assert checkout.run(". scripts/env.sh").returncode == 0
    return checkout


def started(checkout: Checkout, command: str, **variables: str) -> str:
    result = checkout.run(command, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(("script", "config"), [("train_vlm.sh", "vlm_digits"), ("train_gpt.sh", "gpt_tiny")])
def test_a_script_starts_the_launcher_of_this_node(checkout, script, config):
    assert started(checkout, f"scripts/{script}") == f"-P -m mimo_train.cli launch here {config}"


def test_the_config_and_the_overrides_are_handed_on(checkout):
    out = started(checkout, "scripts/train_vlm.sh train.iters=1 'my configs/a.yaml' '~log.tensorboard'")
    assert out.endswith("launch here my configs/a.yaml train.iters=1 ~log.tensorboard")


def test_the_exit_code_of_the_launcher_is_that_of_the_script(checkout):
    assert checkout.run("scripts/train_vlm.sh", FAKE_EXIT="16").returncode == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("a b", "two configs, a and b"),
        ("--iters 3", "unknown option --iters"),
        ("a --container-image=b", "--container-image=b is an option of scripts/slurm/train_vlm.sbatch: give it before"),
    ],
)
def test_arguments_that_mean_nothing_are_told(checkout, arguments, words):
    result = checkout.run(f"scripts/train_vlm.sh {arguments}")
    assert (result.returncode, result.stdout) == (1, "") and words in result.stderr
    assert checkout.calls("mimo_train.cli launch") == 0


def test_help_needs_no_environment(tmp_path):
    result = Checkout(tmp_path).run("scripts/train_gpt.sh --help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage: scripts/train_gpt.sh [CONFIG] [key=value ...]" in result.stdout and "MASTER_ADDR" in result.stdout


def submitted(checkout: Checkout, arguments: str = "", verdict: int = 75, **variables: str) -> tuple[int, list[str]]:
    """The exit code of the batch script, and what it has called."""
    job = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "FAKE_VERDICT": str(verdict)} | variables
    code = checkout.run(f"bash scripts/slurm/train_vlm.sbatch {arguments}", **job).returncode
    return code, checkout.calls_file.read_text().splitlines()


def test_a_job_goes_back_into_the_queue(checkout):
    code, (run, ask, again) = submitted(checkout, "my.yaml train.iters=9", FAKE_CODE="1")
    assert run.endswith("--kill-on-bad-exit=1 scripts/train_vlm.sh my.yaml train.iters=9")
    assert "--nodelist=n1 " in ask and ask.endswith(" scripts/slurm/requeue.sh 1 my.yaml train.iters=9")
    assert (code, again) == (0, "scontrol requeue 7")


@pytest.mark.parametrize("verdict", [0, 1, 16])
def test_a_finished_job_and_one_without_hope_end(checkout, verdict):
    code, calls = submitted(checkout, verdict=verdict)
    assert code == verdict and len(calls) == 2


def test_of_an_array_one_task_goes_back(checkout):
    """By the number of the array, or of its last task, which is the same, all would."""
    _, calls = submitted(checkout, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert calls[-1] == "scontrol requeue 7_3"


def test_options_of_containers_go_to_each_step(checkout):
    options = "--container-image=/images/a b.sqsh --no-container-mount-home --container-mounts=/data"
    _, (run, ask, _) = submitted(checkout, "'--container-image=/images/a b.sqsh' " + options.partition("sqsh ")[2])
    assert f"{options} scripts/train_vlm.sh" in run and f"{options} scripts/slurm/requeue.sh 0" in ask


def test_a_task_for_each_rank_is_handed_on(checkout):
    _, (run, ask, _) = submitted(checkout, SLURM_NTASKS_PER_NODE="8")
    assert "--ntasks-per-node=8 " in run and "--ntasks-per-node=1 " in ask


@pytest.mark.parametrize(
    ("job", "cpus"),
    [
        ({"SLURM_CPUS_ON_NODE": "96"}, 96),
        ({"SLURM_CPUS_ON_NODE": "96", "SLURM_NTASKS_PER_NODE": "8"}, 12),
        ({"SLURM_CPUS_ON_NODE": "96", "SLURM_CPUS_PER_TASK": "16"}, 16),
    ],
)
def test_a_job_uses_the_cpus_that_it_was_given(checkout, job, cpus):
    _, (run, *_) = submitted(checkout, **job)
    assert f" --cpus-per-task={cpus} " in run


def test_each_node_stages_before_the_run(checkout):
    _, (stage, run, *_) = submitted(checkout, SLURM_NNODES="2", MIMO_STAGE="cp -r /a /b")
    assert stage == "srun --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c cp -r /a /b"
    assert run.endswith("scripts/train_vlm.sh")


def test_whether_to_start_again_is_asked_in_the_environment_of_the_run(checkout):
    assert started(checkout, "scripts/slurm/requeue.sh 137 my.yaml a=1") == (
        "-P -m mimo_train.cli launch requeue 137 my.yaml a=1"
    )
    assert checkout.run("scripts/slurm/requeue.sh 1", FAKE_EXIT="75").returncode == 75
