"""Map the processes that a launcher has started to the ranks of a run.

The launcher numbers all its processes in RANK, including those without a module (`placement.allow_idle`). The rest of
the program counts only processes with a module: a *rank* is an index among them, and `RunLayout.processes` maps it to
RANK.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.launch.nodes import adopt_tasks
from mimo_train.layout.placement import node_faults
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import Run, resolve
from mimo_train.logging.rank_log import show


class VariablesError(ConfigError):
    """Invalid launcher variables in this process's environment, whatever its rank."""


def started_run(cfg: ConfigContainer) -> Run:
    """Return the run of a config on the started processes; set torchrun's variables if SLURM or MPI started them.

    Raises:
        ConfigError: the config has errors, the layout needs other processes, or launcher variables are invalid.
        UserError: the cluster's variables are invalid.
    """
    adopt_tasks()
    if faults := list(_variable_faults()):
        raise VariablesError(faults)
    run = resolve(cfg, _started_per_node())
    if faults := _process_faults(run):
        raise ConfigError(faults)
    return run


def require_none_idle(run: Run) -> None:
    """Require that every process has a module: only `pretrain` handles idle processes.

    Raises:
        ConfigError: there are processes without a module.
    """
    layout, started = run.layout, _number("WORLD_SIZE", 1)
    if layout.processes != tuple(range(started)):
        text = f"{started} processes for {layout.world_size} ranks: only pretrain runs with processes without a module"
        raise ConfigError([Fault("placement.allow_idle", text)])


def is_idle(layout: RunLayout) -> bool:
    """True if no module is placed on this process."""
    return _process() not in layout.processes


def say_idle() -> None:
    """Print the one line of a process without a module."""
    show(f"process {_process()}: no module is placed here (placement.allow_idle), exiting")


@contextmanager
def numbered(layout: RunLayout) -> Iterator[None]:
    """Set RANK and WORLD_SIZE to the run's numbering without idle processes, then restore the launcher's values."""
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ["RANK"] = str(layout.processes.index(_process()))
    os.environ["WORLD_SIZE"] = str(layout.world_size)
    try:
        yield
    finally:
        for name, value in given.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def is_first_of_node(layout: RunLayout, rank: int) -> bool:
    """True if `rank`, which is this process's, is the lowest on its node."""
    process = layout.processes[rank]
    first_here = process - _number("LOCAL_RANK", 0)
    return rank == 0 or layout.processes[rank - 1] < first_here


def is_on_first_node(layout: RunLayout, rank: int) -> bool:
    """True if `rank` is on the first node; every rank gets the same answer."""
    here = _number("LOCAL_WORLD_SIZE", 0)
    return not here or layout.processes[rank] < here


def _started_per_node() -> int:
    """Return the launcher's processes per node; 0 for a single node or without a launcher."""
    started, here = (_number(name, 0) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return here if 0 < here < started else 0


def _process_faults(run: Run) -> list[Fault]:
    started, needed = _number("WORLD_SIZE", 1), run.layout.processes[-1] + 1
    if started < needed or (started > needed and not run.cfg.placement.allow_idle):
        return [Fault("WORLD_SIZE", _wrong_number(run, started))]
    here, nodes = (_number(name, 0) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if nodes and here * nodes != started:
        # Nodes would place modules differently, each by its own process count.
        text = f"{started} processes on {nodes} nodes, and {here} of them here: start as many on each node"
        return [Fault("LOCAL_WORLD_SIZE", text)]
    # `resolve` has checked the config's nodes; the launcher may have started others.
    return list(node_faults(run.cfg, _started_per_node()))


def _variable_faults() -> Iterator[Fault]:
    wrong = False
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        value = os.environ.get(name, "0")
        if not re.fullmatch(r"\d+", value):
            wrong = True
            yield Fault(name, f"the variable must be a whole number, is {value!r}: {_UNSET}")
    if not wrong and _process() >= max(1, _number("WORLD_SIZE", 1)):
        size = os.environ.get("WORLD_SIZE")
        among = f"WORLD_SIZE is {size}" if size else "WORLD_SIZE is not set, so that there is one process"
        yield Fault("RANK", f"the variable is {_process()}, and {among}; processes are counted from 0: {_UNSET}")


_UNSET = "unset it, or start with torchrun (scripts/train_vlm.sh does), which sets all of them"


def _number(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


def _process() -> int:
    return _number("RANK", 0)


def _wrong_number(run: Run, started: int) -> str:
    layout = run.layout
    needed = layout.processes[-1] + 1
    sizes = ", ".join(
        f"{module.name} {module.size}" + (f" ({module})" if module.size > 1 else "")
        for module in layout.modules.values()
    )
    keys = " and ".join(f"modules.{name}.layout" for name in layout.modules)
    idle = f", or let {started - needed} be idle with placement.allow_idle=true" if started > needed else ""
    return (
        f"{started} {'process was' if started == 1 else 'processes were'} started, the layout needs {needed}: {sizes}. "
        f"Start {needed} (torchrun --nproc-per-node {needed} on one node), or change {keys} (ranks are tp * pp * dp * "
        f"cp; `mimo-train plan CONFIG --gpus {started}` lists layouts){idle}"
    )
