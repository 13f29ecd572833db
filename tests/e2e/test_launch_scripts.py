"""scripts/train_vlm.sh and train_gpt.sh: what they start, with which processes on which nodes, and what they refuse."""

import pytest

from tests.e2e.fake_python import Checkout

SLURM = {"SLURM_JOB_ID": "1234567", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout whose environment notes how it is called; its layouts need as many processes as FAKE_WORLD says."""
    checkout = Checkout(tmp_path_factory.mktemp("launch"), "flock")
    checkout.program("python3.12")
    assert checkout.run(". scripts/env.sh").returncode == 0
    return checkout


def started(checkout: Checkout, command: str, **variables: str) -> str:
    result = checkout.run(command, FAKE_WORLD="4", **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def refused(checkout: Checkout, command: str, **variables: str) -> str:
    result = checkout.run(command, FAKE_WORLD="4", **variables)
    assert (result.returncode, result.stdout) == (1, "")
    assert checkout.calls("mimo_train.launch.torchrun") == 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(("script", "config"), [("train_vlm.sh", "vlm_digits"), ("train_gpt.sh", "gpt_tiny")])
def test_one_node_starts_what_the_layout_needs(checkout, script, config):
    assert started(checkout, f"scripts/{script}") == (
        "OMP=1 -P -m mimo_train.launch.torchrun --standalone --nproc-per-node=4 --no-python "
        f"{checkout.venv}/bin/python -P -u -m mimo_train.cli train {config}"
    )


def test_the_config_and_the_overrides_are_handed_on(checkout):
    out = started(checkout, "scripts/train_vlm.sh train.iters=1 'my configs/a.yaml' '~log.wandb'")
    assert out.endswith("train my configs/a.yaml train.iters=1 ~log.wandb")
    assert checkout.calls("world my configs/a.yaml train.iters=1 ~log.wandb") == 1


def test_several_nodes_share_the_ranks(checkout):
    out = started(checkout, "scripts/train_vlm.sh", NNODES="2", NODE_RANK="1", MASTER_ADDR="node1")
    assert "--nnodes=2 --node-rank=1 --master-addr=node1 --master-port=29500 --nproc-per-node=2 " in out


def test_more_processes_than_the_layout_needs_are_left_to_the_program(checkout):
    out = started(checkout, "scripts/train_vlm.sh", NNODES="3", NODE_RANK="0", MASTER_ADDR="a", NPROC_PER_NODE="2")
    assert "--nnodes=3 " in out and "--nproc-per-node=2 " in out


def test_slurm_says_which_node_this_is(checkout):
    out = started(checkout, "scripts/train_vlm.sh", SLURM_JOB_NODELIST="gpu[003-004]", **SLURM)
    assert "--nnodes=2 --node-rank=1 --master-addr=gpu003 --master-port=24567 --nproc-per-node=2 " in out


def test_variables_of_the_user_come_before_those_of_slurm(checkout):
    assert "--standalone" in started(checkout, "scripts/train_vlm.sh", NNODES="1", **SLURM)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("a1,b[2-3]", "a1"),
        ("gpu[003-005,9],x", "gpu003"),
        ("r[7,9]-ib,c", "r7-ib"),
        ("r[1-2]n[3-4],x", "r1n3"),
        ("g[5],x", "g5"),
    ],
)
def test_the_first_host_of_a_node_list(checkout, nodes, first):
    assert checkout.run(f". scripts/launch.sh; mimo_first_host '{nodes}'").stdout == first + "\n"


def test_a_gpu_run_chooses_its_threads_itself(checkout):
    assert started(checkout, "scripts/train_vlm.sh run.device=cuda").startswith("OMP= ")
    assert started(checkout, "scripts/train_vlm.sh run.device=cpu", OMP_NUM_THREADS="3").startswith("OMP=3 ")


def test_a_gpu_run_gets_what_cuda_needs_and_keeps_what_is_set(checkout):
    line = started(checkout, "scripts/train_vlm.sh run.device=cuda")
    assert line.endswith("CONNECTIONS=1 ALLOC=expandable_segments:True")
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    line = started(checkout, "scripts/train_vlm.sh run.device=cuda", **given)
    assert line.endswith("CONNECTIONS=8 ALLOC=max_split_size_mb:128")
    assert "CONNECTIONS" not in started(checkout, "scripts/train_vlm.sh run.device=cpu")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NPROC_PER_NODE": "3"}, ["needs 4 processes", "1 * 3 = 3", "modules.*.layout", "NPROC_PER_NODE"]),
        (
            {"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "a"},
            ["needs 4 processes", "3 nodes", "modules.*.layout", "placement.allow_idle=true and NPROC_PER_NODE=2"],
        ),
        ({"NNODES": "2", "NODE_RANK": "0"}, ["NNODES is 2", "MASTER_ADDR"]),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, ["NNODES is 2", "NODE_RANK"]),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, ["NODE_RANK is 2", "0 to 1"]),
        ({"NNODES": "two"}, ["NNODES is 'two'"]),
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, ["--ntasks-per-node=1"]),
    ],
)
def test_nodes_and_processes_that_do_not_fit_are_told(checkout, variables, words):
    error = refused(checkout, "scripts/train_vlm.sh", **variables)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("arguments", "words"), [("a b", "two configs, a and b"), ("--iters 3", "unknown option --iters")]
)
def test_arguments_that_mean_nothing_are_told(checkout, arguments, words):
    assert words in refused(checkout, f"scripts/train_vlm.sh {arguments}")


def test_a_wrong_config_starts_nothing(checkout):
    result = checkout.run("scripts/train_vlm.sh nothing")  # no FAKE_WORLD: the config is refused
    assert result.returncode == 1
    assert checkout.calls("mimo_train.launch.torchrun") == 0


def test_help_needs_no_environment(tmp_path):
    result = Checkout(tmp_path).run("scripts/train_gpt.sh --help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage: scripts/train_gpt.sh [CONFIG] [key=value ...]" in result.stdout and "MASTER_ADDR" in result.stdout
