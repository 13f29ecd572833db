"""What is started on a node: by which variables, with which layout, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mimo_train.config.errors import ConfigError, UserError
from mimo_train.launch.nodes import Nodes
from mimo_train.launch.start import Start, launch_of, start_of
from tests.unit.launch.test_nodes import OPEN_MPI, SKY, SLURM

FOUR = ("run.device=cpu", "layout=images_dp2_language_dp2")
RANK = [sys.executable, "-P", "-u", "-m", "mimo_train.cli", "train", "vlm_digits", *FOUR]
ON_NODE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1"}
TORCHRUN = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node1", "PET_NPROC_PER_NODE": "auto"}
NODE_1 = Nodes(2, 1, "node1", 29500)


def started(variables: dict[str, str], *overrides: str) -> Start:
    start = start_of("vlm_digits", [*FOUR, *overrides], variables)
    assert start.rank == [*RANK, *overrides] and start.run_dir == Path("runs/vlm_digits")
    return start


def test_one_node_starts_what_the_layout_needs():
    start = started({})
    assert (start.nodes, start.per_node) == (Nodes(), 4)


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        (TWO, NODE_1),
        (TWO | {"MASTER_PORT": "7"}, replace(NODE_1, port=7)),
        (TORCHRUN, NODE_1),
        (TORCHRUN | {"PET_NNODES": "3", "NNODES": "2", "PET_MASTER_PORT": "29500"}, NODE_1),
        (SLURM | ON_NODE | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, NODE_1),
        (SLURM | ON_NODE, replace(NODE_1, address="gpu003", port=24567)),
        (SKY | {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "node1\nnode2"}, NODE_1),
        (
            {f"OMPI_COMM_WORLD_{name}": number for name, number in zip(("SIZE", "RANK"), "21", strict=True)}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "node1"},
            NODE_1,
        ),
        (SLURM | ON_NODE | {"NNODES": "1"}, Nodes()),
    ],
)
def test_the_nodes_share_the_ranks_whoever_names_them(variables, nodes):
    start = started(variables)
    assert (start.nodes, start.per_node) == (nodes, 4 // nodes.number)


def test_code_that_is_not_there_is_an_error_before_any_rank_starts():
    with pytest.raises(ConfigError) as caught:
        start_of("vlm_digits", [*FOUR, "train.callbacks=[nowhere:One]", "train.forward_step=tests.nowhere:nothing"], {})
    assert [fault.key for fault in caught.value.faults] == ["train.callbacks", "train.forward_step"]
    assert all("PYTHONPATH" in fault.message for fault in caught.value.faults)


@pytest.mark.parametrize("tasks", [SLURM, OPEN_MPI], ids=["slurm", "open mpi"])
def test_where_every_task_is_a_rank_it_becomes_one(tasks):
    six = ["run.device=cpu", "layout=images_dp2_language_dp2", "modules.language.layout.dp=4"]
    six.append("train.micro_batch_size=4")
    start = start_of("vlm_digits", six, tasks)
    assert start.nodes.ranks is not None
    assert start.rank == [sys.executable, "-P", "-u", "-m", "mimo_train.cli", "train", "vlm_digits", *six]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "a"},
            ["needs 4 processes", "3 nodes", "modules.*.layout", "placement.allow_idle=true and NPROC_PER_NODE=2"],
        ),
        ({"NNODES": "2", "NODE_RANK": "0"}, ["NNODES is 2", "MASTER_ADDR"]),
        (TWO | {"NODE_RANK": "2"}, ["NODE_RANK is 2", "0 to 1"]),
        ({"NODE_RANK": "1", "MASTER_ADDR": "a"}, ["NODE_RANK is 1", "NNODES is 1"]),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["WORLD_SIZE is 2", "NNODES"]),
        (
            SLURM
            | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
            | {"SLURM_PROCID": "1"},
            ["needs 4 processes", "SLURM_STEP_TASKS_PER_NODE", "1 * 2 = 2"],
        ),
        (SLURM | {"MIMO_MAX_RESTARTS": "2"}, ["MIMO_MAX_RESTARTS is 2", "SLURM_STEP_TASKS_PER_NODE"]),
        (SLURM | {"NPROC_PER_NODE": "4"}, ["NPROC_PER_NODE is 4", "SLURM_STEP_TASKS_PER_NODE says 2"]),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"}, ["SLURM_NNODES is 2", "srun"]),
    ],
)
def test_nodes_and_processes_that_do_not_fit_are_told(variables, words):
    with pytest.raises(UserError) as raised:
        start_of("vlm_digits", FOUR, variables)
    assert all(word in str(raised.value) for word in words), raised.value


def test_ranks_get_variables_for_speed_that_are_not_set():
    speed = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert started({}).variables == speed
    assert started(dict.fromkeys(speed, "8")).variables == {}
    assert "PYTORCH_ALLOC_CONF" not in started({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}).variables


LAYOUTS = "launch.layouts={2: images_dp2_language_dp2, 1: 'images_dp2_language_dp2 train.micro_batch_size=4'}"


@pytest.mark.parametrize(("nodes", "micro_batch_size"), [(1, 4), (2, 8)])
def test_the_layout_is_that_of_the_number_of_nodes(nodes, micro_batch_size):
    launch = launch_of("vlm_digits", [LAYOUTS], nodes, {})
    assert launch.overrides[0] == "layout=images_dp2_language_dp2" and launch.overrides[-1] == LAYOUTS
    assert launch.cfg.train.micro_batch_size == micro_batch_size and launch.cfg.modules["images"].layout.dp == 2
    assert launch_of("vlm_digits", [LAYOUTS, "train.micro_batch_size=2"], 1, {}).cfg.train.micro_batch_size == 2


def test_an_override_with_dots_takes_the_place_of_a_layout():
    launch = launch_of("vlm_digits", ["launch.layouts={2: two_processes}", "launch.layouts.2=one_process"], 2, {})
    assert launch.cfg.launch.layouts == {2: "one_process"} and launch.overrides[0] == "layout=one_process"


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ("{a: one_process}", "launch.layouts: must be a mapping whose keys are whole numbers"),
        ("{0: one_process}", "launch.layouts.0: the number of nodes must be at least 1"),
        ("{2: 'launch.layouts={}'}", "launch.layouts.2: changes launch.layouts, which has been read"),
        ("{1: '', 3: ''}", "launch.layouts: has layouts for 1, 3 nodes, and this run has 2"),
    ],
)
def test_layouts_that_cannot_be_are_named(layouts, words):
    with pytest.raises(UserError) as raised:
        launch_of("vlm_digits", [f"launch.layouts={layouts}"], 2, {})
    assert words in str(raised.value)


def test_tasks_of_an_array_have_folders_and_lines_of_their_own(tmp_path):
    file = tmp_path / "sweep.txt"
    file.write_text("optim.lr=1e-3\noptim.lr=2e-3 'data.chat_template=a b'\n")
    variables = {"SLURM_ARRAY_TASK_ID": "2", "MIMO_ARRAY_FILE": str(file)}
    cfg = launch_of("vlm_digits", ["run.dir=runs/sweep"], 1, variables).cfg
    assert (cfg.run.dir, cfg.optim.lr, cfg.data.chat_template) == ("runs/sweep/task_2", 2e-3, "a b")
    assert launch_of("vlm_digits", [], 1, {"SLURM_ARRAY_TASK_ID": "7"}).cfg.run.dir == "runs/vlm_digits/task_7"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3"}, ["has 2 lines", "task 3"]),
        ({}, ["SLURM_ARRAY_TASK_ID is not set", "sbatch --array=1-N"]),
        ({"SLURM_ARRAY_TASK_ID": "1", "MIMO_ARRAY_FILE": "nowhere.txt"}, ["nowhere.txt", "No such file"]),
    ],
)
def test_a_task_without_a_line_is_an_error(tmp_path, variables, words):
    (tmp_path / "sweep.txt").write_text("a=1\nb=2\n")
    with pytest.raises(UserError) as raised:
        launch_of("vlm_digits", [], 1, {"MIMO_ARRAY_FILE": str(tmp_path / "sweep.txt")} | variables)
    assert all(word in str(raised.value) for word in words), raised.value
