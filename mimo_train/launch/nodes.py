"""Read the nodes of a run, and this process's place among them, from environment variables.

The variables come from the user (NNODES, ...), from torchrun (PET_*), or from the cluster command that started this
task: srun (SLURM), mpirun (Open MPI), mpiexec (MPICH, Intel MPI) or SkyPilot. A single task on a node launches that
node's ranks; several tasks on a node are the ranks themselves.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mimo_train.config.errors import UserError

Environment = Mapping[str, str]
PORT = 29500
"""Default MASTER_PORT, the same as torchrun's."""
ALONE = "1"
"""WORLD_SIZE of a task that is a run of its own."""
TORCHRUN = "PET_"
"""Prefix of the variables that torchrun reads its options from. Kubeflow sets them in a job's pods."""
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
RESTARTS = "MIMO_MAX_RESTARTS"
RENDEZVOUS = ("STANDALONE", "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_CONF")
"""torchrun's rendezvous options; our launchers always meet at MASTER_ADDR:MASTER_PORT."""
LARGEST_PORT = 65535
_ANY_NUMBER = ("auto", "gpu", "cpu")
"""torchrun's words for an automatic process count; here the layout sets the count."""


@dataclass(frozen=True)
class Tasks:
    """The tasks that one command has started, and this task's place. A node's tasks have consecutive numbers."""

    size: int
    rank: int
    local_size: int
    local_rank: int
    variables: tuple[str, str, str, str]
    """Names of the variables that hold the four numbers, in the same order."""
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

    Inside a SLURM job, mpirun and mpiexec start their daemons with srun, so their variables are read first.

    Raises:
        UserError: the variables are invalid, nodes have different task counts, or a node's tasks are not consecutive.
    """
    tasks = _open_mpi(environment) or _pmi(environment) or _slurm(environment) or _skypilot(environment)
    if tasks is not None:
        _require_even(tasks)
    return tasks


def _open_mpi(environment: Environment) -> Tasks | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    if names[0] not in environment:
        return None
    return _read(environment, names)


def _pmi(environment: Environment) -> Tasks | None:
    """Skip PMI under srun if the node's variables are missing: SLURM's variables then say the same and more."""
    if "PMI_RANK" not in environment or ("MPI_LOCALNRANKS" not in environment and "SLURM_STEP_ID" in environment):
        return None
    return _read(environment, ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"])


def _slurm(environment: Environment) -> Tasks | None:
    """Read a job step. Batch scripts and shells of salloc or `srun --pty` also have variables but are not tasks."""
    is_step = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys()
    if not is_step or "SLURM_PTY_PORT" in environment:
        return None
    on_nodes = [*_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))]
    if len({*on_nodes}) > 1:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE is {environment['SLURM_STEP_TASKS_PER_NODE']}: start as many tasks on each node"
        )
    node = number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"), 0)
    if node >= len(on_nodes):
        raise UserError(f"SLURM_NODEID is {node}, in a job step on {len(on_nodes)} nodes (SLURM_STEP_TASKS_PER_NODE)")
    names = ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"]
    job = number("SLURM_JOB_ID", environment["SLURM_JOB_ID"], 0)
    return _read(
        {**environment, "SLURM_STEP_TASKS_PER_NODE": str(on_nodes[node])},
        names,
        first_host(environment.get("SLURM_STEP_NODELIST", "")),
        20000 + job % 10000,  # below the ephemeral port range
    )


def _skypilot(environment: Environment) -> Tasks | None:
    if "SKYPILOT_NODE_RANK" not in environment:
        return None
    names = ["SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"]
    size, rank = (_number_of(environment, name, names) for name in names[:2])
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if len(addresses) != size:
        raise UserError(f"SKYPILOT_NODE_IPS has {len(addresses)} addresses, and SKYPILOT_NUM_NODES is {size}")
    return Tasks(size, rank, 1, 0, (names[0], names[1], names[2], names[3]), addresses[0])


def _read(environment: Environment, names: list[str], address: str = "", port: int = PORT) -> Tasks:
    size, rank, local_size, local_rank = (_number_of(environment, name, names) for name in names)
    for many, one, name in ((size, rank, 0), (local_size, local_rank, 2)):
        if one >= many:
            raise UserError(f"{names[name + 1]} is {one}, and {names[name]} {many}: tasks are counted from 0")
    return Tasks(size, rank, local_size, local_rank, (names[0], names[1], names[2], names[3]), address, port)


def _number_of(environment: Environment, name: str, all_of_them: Sequence[str]) -> int:
    if name not in environment:
        others = ", ".join(dict.fromkeys(other for other in all_of_them if other in environment))
        raise UserError(
            f"{name} is not set, and {others} {'are' if ', ' in others else 'is'}: which task of which node this is, "
            f"cannot be known; set {name} too, or start one `mimo-train launch here` on each node with NNODES, "
            "NODE_RANK and MASTER_ADDR, which come first (NNODES=1: a run of this node alone)"
        )
    return number(name, environment[name], 0)


def number(name: str, text: str, least: int) -> int:
    """Return a variable's text as an integer. Raises UserError if it is not a whole number, or it is below `least`."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise UserError(f"{name} is {text!r}: give a whole number, at least {least}")
    return int(text)


def _require_even(tasks: Tasks) -> None:
    size, rank, local_size, local_rank = tasks.variables
    if tasks.size % tasks.local_size:
        raise UserError(
            f"{size} is {tasks.size}, and {local_size} of this node {tasks.local_size}: start as many tasks on each "
            "node"
        )
    if tasks.rank % tasks.local_size != tasks.local_rank:
        raise UserError(
            f"{rank} is {tasks.rank}, and {local_rank} {tasks.local_rank} of {tasks.local_size} on this node: tasks of "
            "a node must be numbered one after the other (mpirun --map-by slot, srun --distribution=block)"
        )


def _counts(text: str) -> Iterator[int]:
    """Yield the number of tasks of each node from SLURM's text: 2(x3),1 yields 2, 2, 2, 1."""
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is no list of numbers as 2(x3),1")
        yield from [int(found[1])] * int(found[2] or 1)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list such as gpu[003-005,9],login1."""
    scontrol = shutil.which("scontrol")
    if scontrol and nodes:
        shown = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True)
        if shown.returncode == 0 and shown.stdout:
            return shown.stdout.splitlines()[0]
    first = ""
    # Containers have no scontrol.
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
        UserError: variables are invalid, missing or contradict each other.
    """
    given = _given(environment)
    restarts = number(RESTARTS, given.pop(RESTARTS, "0"), 0)
    per_node = number("NPROC_PER_NODE", given["NPROC_PER_NODE"], 1) if "NPROC_PER_NODE" in given else 0
    if "NNODES" in given:
        return _named(given, per_node, restarts)
    _require_no_rank(environment)
    tasks = tasks_of(environment)
    if tasks is None:
        _require_srun(environment)
        _require_first(given, "NNODES is not set")
        return Nodes(per_node=per_node, max_restarts=restarts)
    if tasks.local_size > 1:
        return _of_ranks(tasks, per_node, restarts)
    if tasks.nodes == 1:
        return Nodes(per_node=per_node, max_restarts=restarts)
    source = tasks.variables[1]
    if given.get("NODE_RANK", str(tasks.node)) != str(tasks.node):
        raise UserError(f"NODE_RANK is {given['NODE_RANK']}, and {source} says {tasks.node}: unset NODE_RANK")
    derived = {"NNODES": str(tasks.nodes), "NODE_RANK": str(tasks.node), "MASTER_PORT": str(tasks.port)}
    return _named(derived | ({"MASTER_ADDR": tasks.address} if tasks.address else {}) | given, per_node, restarts)


def without_torchruns(environment: Environment) -> dict[str, str]:
    """Return the environment without the torchrun variables that `nodes_of` reads."""
    read = {f"{TORCHRUN}{name}" for name in (*VARIABLES, "MAX_RESTARTS", *RENDEZVOUS)}
    return {name: value for name, value in environment.items() if name not in read}


def _given(environment: Environment) -> dict[str, str]:
    values = {name: environment[name] for name in (*VARIABLES, RESTARTS) if environment.get(name)}
    for name in (*VARIABLES, "MAX_RESTARTS"):
        ours, theirs = RESTARTS if name == "MAX_RESTARTS" else name, f"{TORCHRUN}{name}"
        value = environment.get(theirs, "")
        if name == "NNODES" and ":" in value:
            fewest, _, most = value.partition(":")
            if fewest != most:
                raise UserError(f"{theirs} is {value}: the number of nodes must be one, since the layout depends on it")
            value = most
        if not value or (name == "NPROC_PER_NODE" and value in _ANY_NUMBER):
            continue
        if values.setdefault(ours, value) != value:
            raise UserError(f"{ours} is {values[ours]}, and {theirs} is {value}: unset one of them")
    for name in RENDEZVOUS:
        value = environment.get(f"{TORCHRUN}{name}", "")
        if value not in ("", "0", "static"):
            raise UserError(f"{TORCHRUN}{name} is {value}: launchers meet at MASTER_ADDR, MASTER_PORT; unset it")
    return values


def _named(given: dict[str, str], per_node: int, restarts: int) -> Nodes:
    nodes = number("NNODES", given["NNODES"], 1)
    if nodes == 1:
        _require_first(given, "NNODES is 1")
        return Nodes(per_node=per_node, max_restarts=restarts)
    if "MASTER_ADDR" not in given:
        raise UserError(f"NNODES is {nodes}, but MASTER_ADDR, the name of node 0, is not set")
    if "NODE_RANK" not in given:
        raise UserError(f"NNODES is {nodes}, but NODE_RANK, 0 to {nodes - 1}, is not set")
    node = number("NODE_RANK", given["NODE_RANK"], 0)
    if node >= nodes:
        raise UserError(f"NODE_RANK is {node}, but NNODES is {nodes}: give 0 to {nodes - 1}")
    port = number("MASTER_PORT", given.get("MASTER_PORT", str(PORT)), 1)
    if port > LARGEST_PORT:
        raise UserError(f"MASTER_PORT is {port}: give a port, at most {LARGEST_PORT}")
    return Nodes(nodes, node, given["MASTER_ADDR"], port, per_node, restarts)


def _of_ranks(tasks: Tasks, per_node: int, restarts: int) -> Nodes:
    if per_node not in (0, tasks.local_size):
        raise UserError(f"NPROC_PER_NODE is {per_node}, and {tasks.variables[2]} says {tasks.local_size}: unset it")
    if restarts:
        raise UserError(
            f"{RESTARTS} is {restarts}, and {tasks.variables[2]} says that {tasks.local_size} tasks were started on "
            "this node: each is a rank, and no launcher starts it again; start one task on each node, or unset it"
        )
    return Nodes(tasks.nodes, tasks.node, per_node=tasks.local_size, ranks=tasks)


def _require_first(given: dict[str, str], why: str) -> None:
    """Reject a NODE_RANK other than 0: that node would train a second run in the same folder."""
    if number("NODE_RANK", given.get("NODE_RANK", "0"), 0):
        raise UserError(f"NODE_RANK is {given['NODE_RANK']}, and {why}: set NNODES to the number of nodes")


def _require_no_rank(environment: Environment) -> None:
    """Reject WORLD_SIZE: Kubeflow's PyTorchJob numbers pods in it, and here it counts processes."""
    world = environment.get("WORLD_SIZE", "")
    if world not in ("", ALONE):
        raise UserError(
            f"WORLD_SIZE is {world}, which is for a rank, and this is a launcher: give NNODES, NODE_RANK and "
            "MASTER_ADDR, and unset WORLD_SIZE"
        )


def _require_srun(environment: Environment) -> None:
    """Reject a multi-node batch script without srun: it runs on the first node only."""
    nodes = environment.get("SLURM_NNODES", "1")
    if "SLURM_NODEID" in environment and "SLURM_STEP_ID" not in environment and nodes != "1":
        raise UserError(
            f"SLURM_NNODES is {nodes}, but srun did not start this: only one node of the job runs it; use srun "
            "--ntasks-per-node=1, or NNODES=1 for a run on this node"
        )


def adopt_tasks() -> None:
    """Set torchrun's rank variables (RANK, WORLD_SIZE, ..., MASTER_ADDR, MASTER_PORT) from the cluster's variables.

    No effect on ranks of torchrun, which may run inside such a task, or if WORLD_SIZE is 1 (each task is its own run).

    Raises:
        UserError: see `tasks_of`; or two variables disagree, or the first node is unknown.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE") == ALONE:
        return
    tasks = tasks_of(os.environ)
    if tasks is None or tasks.size == 1:
        return
    names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    numbers = (tasks.size, tasks.rank, tasks.local_size, tasks.local_rank)
    for name, value, source in zip(names, numbers, tasks.variables, strict=True):
        given = os.environ.get(name, str(value))
        if given != str(value):
            raise UserError(f"{name} is {given}, and {source} says {value}: unset {name}")
    address = os.environ.get("MASTER_ADDR") or tasks.address or ("localhost" if tasks.nodes == 1 else "")
    if not address:
        raise UserError(f"{tasks.size} tasks on {tasks.nodes} nodes: set MASTER_ADDR to the name of the first node")
    os.environ |= {name: str(value) for name, value in zip(names, numbers, strict=True)}
    os.environ |= {"GROUP_WORLD_SIZE": str(tasks.nodes), "MASTER_ADDR": address}
    os.environ.setdefault("MASTER_PORT", str(tasks.port))
