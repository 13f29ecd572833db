"""Map the processes that a launcher has started to the ranks of a run.

The launcher numbers all its processes in RANK, including those without a module (`placement.allow_idle`). The rest of
the program counts only processes with a module: a *rank* is an index among them, and `RunLayout.processes` maps it to
RANK.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from data.text_format import plural
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.launch.nodes import adopt_tasks, number
from mimo_train.layout.placement import node_faults
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import Run, resolve
from mimo_train.logging.rank_log import show


def started_run(cfg: ConfigContainer) -> Run:
    """Return the run of a config on the started processes; set torchrun's variables if SLURM or MPI started them.

    Raises:
        ConfigError: the config has errors, or the layout needs other processes.
        UserError: variables of the launcher or the cluster are invalid.
    """
    adopt_tasks()
    world = _number("WORLD_SIZE", 1)
    number("RANK", os.environ.get("RANK", "0"), 0, max(1, world) - 1)
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
    before = dict(os.environ)
    os.environ |= {"RANK": str(layout.processes.index(_process())), "WORLD_SIZE": str(layout.world_size)}
    try:
        yield
    finally:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
            os.environ.update({name: before[name]} if name in before else {})


def is_first_of_node(layout: RunLayout, rank: int) -> bool:
    """True if `rank`, which is this process's, is the lowest on its node."""
    process = layout.processes[rank]
    first_here = process - _number("LOCAL_RANK", 0)
    return rank == 0 or layout.processes[rank - 1] < first_here


def is_on_first_node(layout: RunLayout, rank: int) -> bool:
    """True if `rank` is on the first node; every rank gets the same answer."""
    local_size = _number("LOCAL_WORLD_SIZE", 0)
    return not local_size or layout.processes[rank] < local_size


def _started_per_node() -> int:
    """Return the launcher's processes per node; 0 for a single node or without a launcher."""
    started, local_size = (_number(name, 0) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return local_size if 0 < local_size < started else 0


def _process_faults(run: Run) -> list[Fault]:
    started, needed = _number("WORLD_SIZE", 1), run.layout.processes[-1] + 1
    if started < needed or (started > needed and not run.cfg.placement.allow_idle):
        modules = run.layout.modules.values()
        sizes = ", ".join(f"{module.name} {module.size} ({module})" for module in modules)
        keys = " and ".join(f"modules.{module.name}.layout" for module in modules)
        idle = f", or let {started - needed} be idle with placement.allow_idle=true" if started > needed else ""
        text = (
            f"{plural(started, 'process')} started, the layout needs {needed}: {sizes}. Start {needed} (torchrun "
            f"--nproc-per-node {needed} on one node), or change {keys} (ranks are tp * pp * dp * cp; `mimo-train plan "
            f"CONFIG --gpus {started}` lists layouts){idle}"
        )
        return [Fault("WORLD_SIZE", text)]
    local_size, nodes = (_number(name, 0) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if nodes and local_size * nodes != started:
        # Nodes would place modules differently, each by its own process count.
        text = f"{started} processes on {nodes} nodes, and {local_size} of them here: start as many on each node"
        return [Fault("LOCAL_WORLD_SIZE", text)]
    # `resolve` has checked the config's nodes; the launcher may have started others.
    return list(node_faults(run.cfg, _started_per_node()))


def _number(variable: str, default: int) -> int:
    return number(variable, os.environ.get(variable, str(default)), 0)


def _process() -> int:
    return _number("RANK", 0)
