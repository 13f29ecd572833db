"""Read the nodes of a run, and this process's place among them, from environment variables.

The first of these that is set decides: the user's (NNODES, ...), torchrun's (PET_*), those of the cluster command that
started this task (`SCHEDULERS`). A single task on a node launches that node's ranks; several are the ranks themselves.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mimo_train.config.errors import UserError

Environment = Mapping[str, str]
PORT = 29500
"""Default MASTER_PORT, the same as torchrun's."""
LARGEST_PORT = 65535
VARIABLES = {
    name: f"PET_{name}" for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
} | {"MIMO_MAX_RESTARTS": "PET_MAX_RESTARTS"}
"""The user's variables, and those that torchrun reads the same options from; Kubeflow sets them."""
SCHEDULERS = (
    # mpirun and mpiexec start their daemons with srun inside a SLURM job, so their variables come first.
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),  # one task per node
)
"""Variables with the number of tasks, this task's number, and both numbers on its node."""


@dataclass(frozen=True)
class Tasks:
    """The tasks that one cluster command has started, and this task's place."""

    size: int
    rank: int
    local_size: int
    local_rank: int
    variables: tuple[str, ...]
    """Names of the variables that hold the numbers, in the same order."""
    address: str = ""
    """Address of the first node; empty if the variables do not name it."""
    port: int = PORT

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.size // self.local_size

    @property
    def node(self) -> int:
        """Return the index of this node, 0 to `nodes` - 1."""
        return self.rank // self.local_size


def tasks_of(environment: Environment) -> Tasks | None:
    """Return the cluster tasks that this process belongs to; None if there are none.

    Raises:
        UserError: a variable is invalid or missing, nodes have different task counts, or a node's tasks are not
            consecutive.
    """
    variables = next((names for names in SCHEDULERS if _has_started(names[1], environment)), None)
    if variables is None:
        return None
    if missing := [name for name in variables if name not in environment]:
        raise UserError(
            f"{', '.join(missing)} must be set, because {variables[1]} is. Or start one `mimo-train launch here` on "
            "each node with NNODES, NODE_RANK and MASTER_ADDR, which come first (NNODES=1: a run of this node alone)."
        )
    texts = {name: environment[name] for name in variables}
    on_nodes = "SLURM_STEP_TASKS_PER_NODE"
    if on_nodes in texts:  # "2(x3)" means 2 on each of 3 nodes, "2,1" different numbers
        texts[on_nodes] = re.sub(r"\(x\d+\)$", "", texts[on_nodes])
        if "," in texts[on_nodes]:
            raise UserError(f"{on_nodes} is {environment[on_nodes]}: start as many tasks on each node")
    numbers = [number(name, text, 0) for name, text in texts.items()]
    size, rank, local_size, local_rank = [*numbers, 1, 0][:4]
    tasks = Tasks(size, rank, local_size, local_rank, variables, *_first_node(variables[1], environment))
    if not (rank < size and local_rank < local_size and size % local_size == 0 and rank % local_size == local_rank):
        raise UserError(
            ", ".join(f"{name} is {text}" for name, text in texts.items())
            + ": start as many tasks on each node, numbered from 0, and on a node one after the other (mpirun --map-by "
            "slot, srun --distribution=block)"
        )
    return tasks


def _has_started(rank: str, environment: Environment) -> bool:
    """True if the cluster command with this rank variable has started this task."""
    if rank == "PMI_RANK" and "SLURM_STEP_ID" in environment and "MPI_LOCALNRANKS" not in environment:
        return False  # srun sets it too
    if rank == "SLURM_PROCID" and ("SLURM_STEP_ID" not in environment or "SLURM_PTY_PORT" in environment):
        return False  # a batch script, or a shell of salloc or `srun --pty`
    return rank in environment


def _first_node(rank: str, environment: Environment) -> tuple[str, int]:
    """Return the address of the first node, "" if unknown, and the port of the job."""
    if rank == "SLURM_PROCID":
        job = number("SLURM_JOB_ID", environment["SLURM_JOB_ID"], 0)
        # Ports below the ephemeral range, since several jobs may share a node.
        return first_host(environment.get("SLURM_STEP_NODELIST", "")), 20000 + job % 10000
    if rank == "SKYPILOT_NODE_RANK":
        return (environment.get("SKYPILOT_NODE_IPS", "").split() or [""])[0], PORT
    return "", PORT


def number(name: str, text: str, least: int, most: int = 10**9) -> int:
    """Return a variable's text as an integer. Raises UserError if it is not a whole number from `least` to `most`."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        at_most = f", at most {most}" if most < 10**9 else ""
        raise UserError(f"{name} is {text!r}: give a whole number, at least {least}{at_most}")
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list such as gpu[003-005,9],login1."""
    first = ""
    while "[" in nodes.partition(",")[0]:
        before, _, rest = nodes.partition("[")
        inside, _, nodes = rest.partition("]")
        first += before + re.split("[-,]", inside)[0]
    return first + nodes.partition(",")[0]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run and this node's place."""

    number: int = 1
    node: int = 0
    address: str = ""
    """Address of node 0; required for several nodes."""
    port: int = PORT
    per_node: int = 0
    """Processes per node; 0 uses what the layout needs."""
    max_restarts: int = 0
    ranks: Tasks | None = None
    """Set if the cluster's tasks are the ranks themselves."""


def nodes_of(environment: Environment) -> Nodes:
    """Return the nodes from a launcher's variables: NNODES if set, else the cluster's tasks, else one node.

    Raises:
        UserError: variables are invalid or missing.
    """
    values = {}
    for name, torchruns in VARIABLES.items():
        text = environment.get(name) or environment.get(torchruns) or ""
        # The layout decides the number of processes that torchrun's words leave open.
        if text and not (name == "NPROC_PER_NODE" and text in ("auto", "gpu", "cpu")):
            values[name] = text
    restarts = number("MIMO_MAX_RESTARTS", values.get("MIMO_MAX_RESTARTS", "0"), 0)
    per_node = number("NPROC_PER_NODE", values["NPROC_PER_NODE"], 1) if "NPROC_PER_NODE" in values else 0
    if "NNODES" not in values:
        tasks = tasks_of(environment)
        if tasks is None:
            _require_node_alone(environment)
        elif tasks.local_size > 1:
            return _nodes_of_ranks(tasks, per_node, restarts)
        else:
            values = {
                "NNODES": str(tasks.nodes),
                "NODE_RANK": str(tasks.node),
                "MASTER_ADDR": tasks.address,
                "MASTER_PORT": str(tasks.port),
            } | values
    nodes = number("NNODES", values.get("NNODES", "1"), 1)
    for name in ("MASTER_ADDR", "NODE_RANK"):
        if nodes > 1 and not values.get(name):
            raise UserError(f"NNODES is {nodes}, but {name} is not set")
    node = number("NODE_RANK", values.get("NODE_RANK", "0"), 0)
    if node >= nodes:
        raise UserError(f"NODE_RANK is {node}, but NNODES is {nodes}: nodes are numbered 0 to {nodes - 1}")
    if nodes == 1:
        return Nodes(per_node=per_node, max_restarts=restarts)
    port = number("MASTER_PORT", values.get("MASTER_PORT", str(PORT)), 1, LARGEST_PORT)
    return Nodes(nodes, node, values["MASTER_ADDR"], port, per_node, restarts)


def _nodes_of_ranks(tasks: Tasks, per_node: int, restarts: int) -> Nodes:
    if per_node not in (0, tasks.local_size):
        raise UserError(f"NPROC_PER_NODE is {per_node}, and {tasks.variables[2]} says {tasks.local_size}: unset it")
    if restarts:
        raise UserError(
            f"MIMO_MAX_RESTARTS is {restarts}, and {tasks.variables[2]} says {tasks.local_size}: these tasks are "
            "ranks, and no launcher restarts them. Start one task on each node, or unset it."
        )
    return Nodes(tasks.nodes, tasks.node, per_node=tasks.local_size, ranks=tasks)


def _require_node_alone(environment: Environment) -> None:
    """Raise UserError if other nodes were started alike: each would train a run of its own in the same folder."""
    for name, started_by in (("WORLD_SIZE", ""), ("SLURM_NNODES", "SLURM_NODEID")):
        if environment.get(name, "1") != "1" and (not started_by or started_by in environment):
            raise UserError(
                f"{name} is {environment[name]}, and NNODES is not set: set NNODES, NODE_RANK and MASTER_ADDR, or in "
                "a SLURM job start with srun --ntasks-per-node=1 (NNODES=1: a run of this node alone)"
            )


def adopt_tasks() -> None:
    """Set torchrun's rank variables (RANK, WORLD_SIZE, ..., MASTER_ADDR, MASTER_PORT) from the cluster's variables.

    Variables that are set stay. No effect on ranks of torchrun, which may run inside such a task, or if WORLD_SIZE is 1
    (each task is its own run).

    Raises:
        UserError: see `tasks_of`; or the first node is unknown.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return
    tasks = tasks_of(os.environ)
    if tasks is None or tasks.size == 1:
        return
    address = os.environ.get("MASTER_ADDR") or tasks.address or ("localhost" if tasks.nodes == 1 else "")
    if not address:
        raise UserError(f"{tasks.size} tasks on {tasks.nodes} nodes: set MASTER_ADDR to the name of the first node")
    for name, value in {
        "WORLD_SIZE": tasks.size,
        "RANK": tasks.rank,
        "LOCAL_WORLD_SIZE": tasks.local_size,
        "LOCAL_RANK": tasks.local_rank,
        "GROUP_WORLD_SIZE": tasks.nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": tasks.port,
    }.items():
        os.environ.setdefault(name, str(value))
