"""Which tasks a cluster has started, by the variables of each of its programs, and the ranks that follow."""

import os

import pytest

from mimo_train.config.errors import UserError
from mimo_train.launch.nodes import Tasks, adopt_tasks, first_host, tasks_of

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-005]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("SIZE", "RANK"), ("6", "3"), strict=True)}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_SIZE": "6", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SKY = {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}


@pytest.fixture
def set_only():
    """Replaces the environment of this process, until the end of the test."""
    before = dict(os.environ)

    def set_only(**variables: str) -> None:
        os.environ.clear()
        os.environ.update({"PATH": before["PATH"], **variables})

    yield set_only
    os.environ.clear()
    os.environ.update(before)


def numbers(tasks: Tasks | None) -> tuple[int, ...]:
    assert tasks is not None
    return tasks.size, tasks.rank, tasks.local_size, tasks.local_rank, tasks.nodes, tasks.node


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI, MPICH], ids=["slurm", "open mpi", "mpich"])
def test_each_program_says_the_same(variables):
    assert numbers(tasks_of(variables)) == (6, 3, 2, 1, 3, 1)


def test_slurm_names_the_first_node_and_gives_each_job_its_port():
    tasks = tasks_of(SLURM)
    assert tasks is not None and (tasks.address, tasks.port) == ("gpu003", 24567)


def test_a_task_of_skypilot_is_a_node():
    tasks = tasks_of(SKY)
    assert numbers(tasks) == (3, 1, 1, 0, 3, 1) and tasks.address == "10.0.0.1"


def test_mpirun_inside_of_a_slurm_job_comes_first():
    """It starts its daemons with srun, one on each node, whose variables the ranks inherit."""
    daemons = SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1"}
    daemons |= {"SLURM_LOCALID": "0"}
    for variables in (OPEN_MPI, MPICH):
        assert numbers(tasks_of(daemons | variables)) == (6, 3, 2, 1, 3, 1)


def test_what_srun_sets_for_pmi_is_not_taken_for_mpiexec():
    assert numbers(tasks_of(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "6"})) == (6, 3, 2, 1, 3, 1)


@pytest.mark.parametrize(
    "variables",
    [{}, {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, {"SLURM_JOB_ID": "1"}]
    + [SLURM | {"SLURM_PTY_PORT": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}],
    ids=["nothing", "a batch script", "a shell of salloc", "a shell of srun"],
)
def test_what_is_no_task(variables):
    assert tasks_of(variables) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, ["OMPI_COMM_WORLD_RANK is 'x'"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "6"}, ["SIZE is 6, OMPI_COMM_WORLD_RANK is 6", "numbered from 0"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ["OMPI_COMM_WORLD_RANK is 3", "one after the other"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "7"}, ["OMPI_COMM_WORLD_SIZE is 7", "as many tasks on each node"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPI_LOCALNRANKS, MPI_LOCALRANKID must be set", "NNODES, NODE_RANK"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,2(x2)"}, ["is 1,2(x2)", "as many tasks on each node"]),
    ],
)
def test_variables_that_cannot_be_are_named(variables, words):
    with pytest.raises(UserError) as raised:
        tasks_of(variables)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("a1,b[2-3]", "a1"),
        ("gpu[003-005,9],x", "gpu003"),
        ("r[7,9]-ib,c", "r7-ib"),
        ("r[1-2]n[3-4],x", "r1n3"),
        ("g[5],x", "g5"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_a_task_that_is_a_rank_gets_torchruns_variables(set_only):
    set_only(**SLURM)
    adopt_tasks()
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert found == {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = {name: os.environ.get(name) for name in ("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert found == {"GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "gpu003", "MASTER_PORT": "24567"}
    adopt_tasks()  # again: they agree now


@pytest.mark.parametrize("own", [{"TORCHELASTIC_RUN_ID": "none", "RANK": "5"}, {"WORLD_SIZE": "1"}])
def test_a_rank_of_torchrun_and_a_run_of_its_own_stay(set_only, own):
    set_only(**OPEN_MPI, **own)
    adopt_tasks()
    assert {name: os.environ[name] for name in own} == own and "LOCAL_RANK" not in os.environ


def test_an_unknown_first_node_is_named(set_only):
    set_only(**OPEN_MPI)
    with pytest.raises(UserError, match="on 3 nodes: set MASTER_ADDR"):
        adopt_tasks()
    assert "LOCAL_WORLD_SIZE" not in os.environ
