"""Start this node's part of a run (`mimo-train launch here`): find the nodes and the layout, then launch the ranks."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.text_format import plural
from mimo_train.config import compose
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.pretrained.hub import recorded_names
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import missing_code
from mimo_train.launch.nodes import Nodes, nodes_of, number
from mimo_train.launch.restarts import require_resume
from mimo_train.layout.ranks import lay_out
from mimo_train.layout.run import INPUT_KEYS, config_faults, resolve

ARRAY_FILE = "MIMO_ARRAY_FILE"
"""Variable with a file of overrides: task N of a job array takes line N, counted from 1."""


# -P: a data.py or encoders/ in the working directory must not hide ours.
_RANK = (sys.executable, "-P", "-u", "-m", "mimo_train.cli")


@dataclass(frozen=True)
class Launch:
    """A config with the overrides of nodes and job array."""

    config: str
    overrides: list[str]
    cfg: ConfigContainer
    without_data: bool = False
    """True if files of tokenizer, weights and shards need not be on this machine."""


def launch_of(
    config: str,
    overrides: Sequence[str],
    nodes: int | None,
    environment: Mapping[str, str],
    *,
    without_data: bool = False,
    weights: bool = False,
) -> Launch:
    """Return the config of a run on a number of nodes.

    Precedence, lowest first: `launch.layouts`, `overrides`, the overrides of a job array's task.

    Args:
        nodes: number of nodes; None skips what depends on it.
        without_data: files of tokenizer, weights and shards need not be on this machine.
        weights: download the weights of models on the Hugging Face hub, see `compose.load`.

    Raises:
        UserError: the config has errors, or nothing for this number of nodes or this task.
    """
    changed = [*overrides, *_line_of_task(environment)]
    load = partial(compose.load, config, without_data=without_data)
    cfg = load(changed, weights=False)
    if faults := list(cfg.launch.faults()):
        raise ConfigError(faults)
    if nodes is not None and (layouts := cfg.launch.layouts):
        if nodes not in layouts:
            sizes = ", ".join(map(str, sorted(layouts)))
            text = f"has layouts for {sizes} nodes, and this run has {nodes}: add one"
            raise ConfigError([Fault("launch.layouts", text)])
        changed = [*cfg.launch.overrides(nodes), *changed]
    if task := environment.get("SLURM_ARRAY_TASK_ID"):
        changed.append(f"run.dir={Path(cfg.run.dir) / f'task_{task}'}")
    return Launch(config, changed, load(changed, weights=weights), without_data)


def _line_of_task(environment: Mapping[str, str]) -> list[str]:
    file = environment.get(ARRAY_FILE)
    if not file:
        return []
    if not environment.get("SLURM_ARRAY_TASK_ID"):
        raise UserError(
            f"{ARRAY_FILE} is {file}, and SLURM_ARRAY_TASK_ID is not set: submit a job array (sbatch --array=1-N), or "
            f"unset {ARRAY_FILE}"
        )
    task = number("SLURM_ARRAY_TASK_ID", environment["SLURM_ARRAY_TASK_ID"], 1)
    try:
        lines = [shlex.split(line) for line in Path(file).read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{ARRAY_FILE} is {file}: {error}") from error
    if task > len(lines):
        raise UserError(f"{ARRAY_FILE} is {file}, which has {plural(len(lines), 'line')}, and this is task {task}")
    return lines[task - 1]


@dataclass(frozen=True)
class Start:
    """Nodes, rank command and environment with which this process starts ranks or becomes one."""

    nodes: Nodes
    per_node: int
    rank: list[str]
    variables: dict[str, str]
    """Variables that the ranks get in addition to this process's."""
    run_dir: Path


def start_of(config: str, overrides: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Return what this launcher starts, according to its environment.

    Raises:
        UserError: variables contradict each other, the config has errors, or the layout does not fit the nodes.
    """
    nodes = nodes_of(environment)
    launch = launch_of(config, overrides, nodes.number, environment, weights=True)
    if missing := list(missing_code(launch.cfg.train)):
        raise ConfigError(missing)
    if nodes.max_restarts:
        require_resume(launch.cfg.checkpoint.resume, f"MIMO_MAX_RESTARTS {nodes.max_restarts}")
    rank = [*_RANK, "train", launch.config, *launch.overrides]
    # Ranks get the commits of names on the hub: none asks the hub, and none gets another commit.
    rank += [f"{key}={name}" for key, name in recorded_names(compose.to_dict(launch.cfg)).items()]
    return Start(nodes, _per_node(launch.cfg, nodes), rank, _speed(environment), Path(launch.cfg.run.dir))


def launch_here(config: str, overrides: Sequence[str]) -> int:
    """Start this node's ranks and return their exit code, or become a rank if every cluster task is one.

    Raises:
        UserError: see `start_of`; or the nodes cannot join.
    """
    start = start_of(config, overrides, os.environ)
    os.environ.update(start.variables)
    if start.nodes.ranks is not None:
        os.execv(start.rank[0], start.rank)
    from mimo_train.launch.torchrun import launch  # torch is a slow import

    return launch(start.rank, start.nodes, start.per_node, start.run_dir)


def launch_command(arguments: Sequence[str], cfg: ConfigContainer, folder: Path) -> int:
    """Start this node's ranks of `mimo-train ARGUMENTS` and return their exit code.

    Args:
        cfg: config whose layout decides how many there are.
        folder: folder of their output, whose files hold the cause of a failure.

    Raises:
        UserError: see `processes_per_node` and `nodes_of`; or the nodes cannot join.
    """
    nodes = nodes_of(os.environ)
    per_node = processes_per_node(cfg, nodes.number)
    os.environ.update(_speed(os.environ))
    from mimo_train.launch.torchrun import launch  # torch is a slow import

    return launch([*_RANK, *arguments], nodes, per_node, folder)


def processes_per_node(cfg: ConfigContainer, nodes: int, *, without_data: bool = False) -> int:
    """Return the number of processes that the layout needs per node.

    Args:
        without_data: files of tokenizer, weights and shards need not be on this machine.

    Raises:
        UserError: the config has errors, or the processes do not divide evenly among the nodes.
    """
    world = _world(cfg, without_data)
    if world % nodes:
        raise UserError(
            f"the layout needs {plural(world, 'process')}, which {nodes} nodes cannot share evenly: change "
            "modules.*.layout (or layout=...) or NNODES, or let some be idle with placement.allow_idle=true and "
            f"NPROC_PER_NODE={-(-world // nodes)}"
        )
    return world // nodes


def _world(cfg: ConfigContainer, without_data: bool) -> int:
    if not without_data:
        return resolve(cfg).layout.processes[-1] + 1
    # Module sizes may come from a directory that is not on this machine.
    parts = ("encoder", "projector", "llm")
    sizes = {
        f"modules.{name}.{part}" for name, module in cfg.modules.items() for part in parts if not getattr(module, part)
    }
    if faults := [fault for fault in config_faults(cfg) if fault.key not in {*INPUT_KEYS, *sizes}]:
        raise ConfigError(faults)
    return lay_out(cfg).processes[-1] + 1


def _per_node(cfg: ConfigContainer, nodes: Nodes) -> int:
    if not nodes.per_node:
        return processes_per_node(cfg, nodes.number)
    world, started = _world(cfg, without_data=False), nodes.number * nodes.per_node
    if started < world:  # more may be started: the rest are idle
        variable = nodes.ranks.variables[2] if nodes.ranks else "NPROC_PER_NODE"
        raise UserError(
            f"the layout needs {plural(world, 'process')}, but NNODES * {variable} = {nodes.number} * {nodes.per_node} "
            f"= {started}: change modules.*.layout (or layout=...), NNODES or {variable}"
        )
    return nodes.per_node


def _speed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for speed that are not set: CPU threads as torchrun does, GPU queues and GPU memory."""
    memory = {} if environment.get("PYTORCH_CUDA_ALLOC_CONF") else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | memory
    return {name: value for name, value in defaults.items() if not environment.get(name)}
