"""The nodes of a run, as a launcher is told: by NNODES and its like, by torchrun's PET_*, or by the tasks of a cluster.
Imports no torch."""

from dataclasses import dataclass

from mimo_train.config.errors import UserError
from mimo_train.launch.tasks import ALONE, PORT, Environment, Tasks, number, tasks_of

TORCHRUN = "PET_"
"""Before the name of an option, the variable that torchrun takes it from; Kubeflow sets them in the pods of a job."""
OWN = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
RESTARTS = "MIMO_MAX_RESTARTS"
MEETING = ("STANDALONE", "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_CONF")
"""torchrun's options of a rendezvous; ours is at MASTER_ADDR, MASTER_PORT."""
LARGEST_PORT = 65535
_AS_MANY_AS_THERE_ARE = ("auto", "gpu", "cpu")
"""What torchrun takes for a number of processes; here it is the layout's."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, and which one this is."""

    number: int = 1
    node: int = 0
    address: str = ""
    """Of node 0; needed for several."""
    port: int = PORT
    per_node: int = 0
    """Processes on each; 0: what the layout needs."""
    max_restarts: int = 0
    ranks: Tasks | None = None
    """Tasks that are the ranks themselves."""


def nodes_of(environment: Environment) -> Nodes:
    """What the variables of a launcher say. NNODES comes first; then the tasks that a cluster has started; else
    there is one node.

    Raises:
        UserError: variables cannot be, contradict each other, or are missing.
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
    """The environment of a launcher that has read its nodes: torchrun itself would read the same variables again."""
    read = {f"{TORCHRUN}{name}" for name in (*OWN, "MAX_RESTARTS", *MEETING)}
    return {name: value for name, value in environment.items() if name not in read}


def _given(environment: Environment) -> dict[str, str]:
    """Our own variables, with those of torchrun under our names."""
    found = {name: environment[name] for name in (*OWN, RESTARTS) if environment.get(name)}
    for name in (*OWN, "MAX_RESTARTS"):
        ours, theirs = RESTARTS if name == "MAX_RESTARTS" else name, f"{TORCHRUN}{name}"
        value = environment.get(theirs, "")
        if name == "NNODES" and ":" in value:
            fewest, _, most = value.partition(":")
            if fewest != most:
                raise UserError(f"{theirs} is {value}: the number of nodes must be one, since the layout depends on it")
            value = most
        if not value or (name == "NPROC_PER_NODE" and value in _AS_MANY_AS_THERE_ARE):
            continue
        if found.setdefault(ours, value) != value:
            raise UserError(f"{ours} is {found[ours]}, and {theirs} is {value}: unset one of them")
    for name in MEETING:
        value = environment.get(f"{TORCHRUN}{name}", "")
        if value not in ("", "0", "static"):
            raise UserError(f"{TORCHRUN}{name} is {value}: launchers meet at MASTER_ADDR, MASTER_PORT; unset it")
    return found


def _named(given: dict[str, str], per_node: int, restarts: int) -> Nodes:
    """Nodes by our own variables."""
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
    """One that is said to be another node must not train a run of its own, in the folder of the others'."""
    if number("NODE_RANK", given.get("NODE_RANK", "0"), 0):
        raise UserError(f"NODE_RANK is {given['NODE_RANK']}, and {why}: set NNODES to the number of nodes")


def _require_no_rank(environment: Environment) -> None:
    """PyTorchJob of Kubeflow numbers its pods in WORLD_SIZE and RANK, which are here those of processes."""
    world = environment.get("WORLD_SIZE", "")
    if world not in ("", ALONE):
        raise UserError(
            f"WORLD_SIZE is {world}, which is for a rank, and this is a launcher: give NNODES, NODE_RANK and "
            "MASTER_ADDR, and unset WORLD_SIZE"
        )


def _require_srun(environment: Environment) -> None:
    """A batch script runs on the first node of its job alone."""
    nodes = environment.get("SLURM_NNODES", "1")
    if "SLURM_NODEID" in environment and "SLURM_STEP_ID" not in environment and nodes != "1":
        raise UserError(
            f"SLURM_NNODES is {nodes}, but srun did not start this: only one node of the job runs it; use srun "
            "--ntasks-per-node=1, or NNODES=1 for a run on this node"
        )
