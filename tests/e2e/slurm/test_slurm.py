"""scripts/slurm/train_vlm.sbatch on a real SLURM of three nodes, with MIMO_SLURM=1; takes about ten minutes."""

import json
import os
import sys
from pathlib import Path

import pytest

from mimo_train.logging.progress import events
from tests.e2e.fake_python import REPOSITORY
from tests.e2e.slurm.cluster import Cluster, missing, until

pytestmark = pytest.mark.skipif(not os.environ.get("MIMO_SLURM"), reason="set MIMO_SLURM=1")

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CALLBACKS = """
import json
import os
import time
from pathlib import Path
from mimo_train.training.callbacks import Callback

class Slow(Callback):
    '''Leaves time for what happens to a run.'''
    def on_step_start(self, state):
        time.sleep(0.3)

class Broken(Callback):
    def on_step_start(self, state):
        if state.train_state.step == 6:
            raise RuntimeError("broken")

class Told(Callback):
    '''Writes down the variables of each rank.'''
    def on_step_start(self, state):
        if state.train_state.step == 0:
            Path(__file__).with_name(f"rank_{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
"""
TOLD = "train.callbacks=[test_callbacks:Told]"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    assert not missing(), f"MIMO_SLURM is set, and these programs are missing: {missing()}"
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits the script with a config; returns the number of the job. What is in `tmp_path` can be imported."""
    (tmp_path / "test_callbacks.py").write_text(CALLBACKS)
    own = {
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}",
        "MASTER_ADDR": "127.0.0.1",  # the names of nodes are those of no machine
        "OMP_NUM_THREADS": "1",
    }

    def submit(options: list[str], *arguments: str, **variables: str) -> str:
        data = [f"data.shards={tmp_path}/data/train", f"data.validation_shards={tmp_path}/data/held_out"]
        common = ["--cpus-per-task=1", "--gpus-per-node=0", f"--output={tmp_path}/%j.log"]
        script = [*common, *options, "scripts/slurm/train_vlm.sbatch", *arguments, *data]
        script += ["run.device=cpu", "log.tensorboard=false", "train.eval_interval=0"]
        before = dict(cluster.env)
        cluster.env.update(own | variables)
        try:
            os.chdir(REPOSITORY)
            return cluster.run("sbatch", "--parsable", *script)
        finally:
            cluster.env = before

    return submit


def starts(run_dir: Path) -> list[int]:
    """Steps that the jobs of a run went on from."""
    return [int(line.facts["step"]) for line in events(run_dir) if line.kind == "start"]


def outcomes(run_dir: Path) -> list[str]:
    return [line.facts["outcome"] for line in events(run_dir) if line.kind == "ended"]


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["lm loss"], line["grad_norm"]) for line in lines if "lm loss" in line]


def steps_of(run_dir: Path) -> int:
    return len(curve(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def require_state(cluster: Cluster, job: str, state: str) -> None:
    """Wait for it; a job that ends otherwise never gets there."""
    until(f"{state} of job {job}", lambda: cluster.state(job) in (state, *OVER))
    assert cluster.state(job) == state, job


def test_a_run_goes_on_after_time_limits_and_a_dead_node(cluster, submit, tmp_path):
    run = ["vlm_digits", "layout=images_dp1_language_dp2", "train.iters=300", "checkpoint.save_interval=20"]
    whole = submit(["--nodes=3", "--time=9"], *run, f"run.dir={tmp_path}/whole")
    require_state(cluster, whole, "COMPLETED")
    broken = tmp_path / "broken"
    slow = "train.callbacks=[test_callbacks:Slow]"
    # SLURM sends the signal up to a minute early, and counts minutes.
    job = submit(["--nodes=3", "--time=3", "--signal=TERM@60"], *run, slow, f"run.dir={broken}")
    require_state(cluster, job, "RUNNING")
    require_state(cluster, job, "PENDING")
    assert outcomes(broken)[0].startswith("signal after step ")
    done = steps_of(broken)
    cluster.start_now(job)
    until("a step of the second job", lambda: steps_of(broken) > done + 25)
    cluster.kill_node("n1")  # where the batch script runs
    require_state(cluster, job, "PENDING")
    cluster.start_node("n1")
    cluster.start_now(job)
    require_state(cluster, job, "RUNNING")
    require_state(cluster, job, "COMPLETED")
    first, second, third = starts(broken)
    assert first == 0 and second == done and third % 20 == 0 and third >= done
    assert curve(broken) == curve(tmp_path / "whole"), "bit by bit"


def test_a_job_ends_at_the_second_of_two_equal_failures(cluster, submit, tmp_path):
    run = tmp_path / "run"
    job = submit(
        ["--nodes=2", "--time=9"],
        *("vlm_digits", "train.iters=20", f"run.dir={run}", "train.callbacks=[test_callbacks:Broken]"),
    )
    until("the first failure", lambda: outcomes(run))
    require_state(cluster, job, "PENDING")
    cluster.start_now(job)
    until("the end", lambda: cluster.state(job) in OVER)
    assert cluster.state(job) == "FAILED"
    assert outcomes(run) == ["failure at step 7: RuntimeError: broken"] * 2


def test_a_run_goes_on_with_the_nodes_that_are_left(cluster, submit, tmp_path):
    run = ["vlm_digits", "train.iters=60", "checkpoint.save_interval=10"]
    alone = submit(["--nodes=1", "--time=9"], *run, "layout=one_process", f"run.dir={tmp_path}/alone")
    require_state(cluster, alone, "COMPLETED")
    layouts = "launch.layouts={3: images_dp1_language_dp2, 2: two_processes}"
    fewer = tmp_path / "fewer"
    slow = "train.callbacks=[test_callbacks:Slow]"
    job = submit(["--nodes=2-3", "--time=9"], *run, layouts, slow, f"run.dir={fewer}")
    until("steps on three nodes", lambda: steps_of(fewer) > 25)
    cluster.kill_node("n3")
    require_state(cluster, job, "PENDING")
    until("that the node is missed", lambda: "down" in cluster.state("node"))
    cluster.start_now(job)
    until("the end", lambda: cluster.state(job) in OVER)
    cluster.start_node("n3")
    assert cluster.state(job) == "COMPLETED"
    worlds = [line.facts["world_size"] for line in events(fewer) if line.kind == "start"]
    assert worlds == ["3", "2"]
    for one, other in zip(curve(fewer), curve(tmp_path / "alone"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def told(tmp_path: Path, ranks: int) -> list[dict[str, str]]:
    """The variables of each rank of a run with TOLD."""
    return [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


def test_every_task_is_a_rank_with_a_gpu_of_its_own(cluster, submit, tmp_path):
    run = tmp_path / "run"
    options = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--gpus-per-task=1", "--time=9"]
    job = submit(options, "vlm_digits", "layout=images_dp2_language_dp2", "train.iters=6", f"run.dir={run}", TOLD)
    require_state(cluster, job, "COMPLETED")
    (start,) = [line for line in events(run) if line.kind == "start"]
    assert start.facts["world_size"] == "4" and len(curve(run)) == 6
    gpus = [(rank["SLURMD_NODENAME"], rank["CUDA_VISIBLE_DEVICES"]) for rank in told(tmp_path, 4)]
    assert gpus == [("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")]


def test_tasks_of_an_array_are_runs_of_their_own_and_go_on_alone(cluster, submit, tmp_path):
    run, file = tmp_path / "run", tmp_path / "sweep.txt"
    file.write_text("optim.lr=1e-3\noptim.lr=2e-3 train.callbacks=[test_callbacks:Slow]\n")
    options = ["--nodes=1", "--array=1-2", "--time=9"]
    array = submit(
        options, "vlm_digits", "layout=one_process", "train.iters=60", f"run.dir={run}", MIMO_ARRAY_FILE=str(file)
    )
    second = f"{array}_2"
    until("steps of the second", lambda: steps_of(run / "task_2") > 5)
    cluster.run("scancel", "--signal=TERM", second)  # as before a time limit: to the tasks alone
    require_state(cluster, second, "PENDING")
    cluster.start_now(second)
    for task in (1, 2):
        require_state(cluster, f"{array}_{task}", "COMPLETED")
    assert len(starts(run / "task_1")) == 1 and len(starts(run / "task_2")) == 2
    assert len(curve(run / "task_1")) == len(curve(run / "task_2")) == 60
