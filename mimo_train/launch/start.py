"""Start this node's part of a run (`mimo-train launch here`): find the nodes and the layout, then launch the ranks."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.text_format import plural
from mimo_train.config import compose
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import missing_code
from mimo_train.launch.nodes import Nodes, nodes_of, number, without_torchruns
from mimo_train.launch.restarts import require_resume
from mimo_train.layout.ranks import lay_out
from mimo_train.layout.run import INPUT_KEYS, config_faults, resolve

ARRAY_FILE = "MIMO_ARRAY_FILE"
"""Variable with a file of overrides: task N of a job array takes line N, counted from 1."""


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
) -> Launch:
    """Return the config of a run on a number of nodes.

    Precedence, lowest first: `launch.layouts`, `overrides`, the overrides of a job array's task.

    Args:
        nodes: number of nodes; None skips what depends on it.
        without_data: files of tokenizer, weights and shards need not be on this machine.

    Raises:
        UserError: the config has errors, or nothing for this number of nodes or this task.
    """
    changed = [*overrides, *_line_of_task(environment)]
    load = partial(compose.load, config, without_data=without_data)
    cfg = load(changed)
    if faults := list(cfg.launch.faults()):
        raise ConfigError(faults)
    if nodes is not None and (layouts := cfg.launch.layouts):
        if nodes not in layouts:
            known = ", ".join(map(str, sorted(layouts)))
            text = f"has layouts for {known} nodes, and this run has {nodes}: add one"
            raise ConfigError([Fault("launch.layouts", text)])
        changed = [*cfg.launch.overrides(nodes), *changed]
        _require_same_run(nodes, cfg, load(changed))
    if task := environment.get("SLURM_ARRAY_TASK_ID"):
        changed.append(f"run.dir={Path(cfg.run.dir) / f'task_{task}'}")
    return Launch(config, changed, load(changed), without_data)


def _require_same_run(nodes: int, cfg: ConfigContainer, changed: ConfigContainer) -> None:
    """Raise ConfigError if `launch.layouts` changes more than where and how the same numbers are computed."""
    before, after = (dict(_flat(compose.to_dict(one))) for one in (cfg, changed))
    others = [key for key in {**before, **after} if before.get(key) != after.get(key) and not _OF_LAYOUT.match(key)]
    if others:
        text = f"changes {', '.join(sorted(others))}, and with it the run: give layouts and microbatches only"
        raise ConfigError([Fault(f"launch.layouts.{nodes}", text)])


_OF_LAYOUT = re.compile(
    r"modules\.\w+\.(layout|recompute)\b|placement\.|train\.(micro_batch_size|recompute)$|data\.workers$"
)
"""Keys that change a run's numbers only by summation order."""


def _flat(plain: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    run_dir: Path


def start_of(config: str, overrides: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Return what this launcher starts, according to its environment.

    Raises:
        UserError: variables contradict each other, the config has errors, or the layout does not fit the nodes.
    """
    nodes = nodes_of(environment)
    launch = launch_of(config, overrides, nodes.number, environment)
    if missing := list(missing_code(launch.cfg.train)):
        raise ConfigError(missing)
    if nodes.max_restarts:
        require_resume(launch.cfg.checkpoint.resume, f"MIMO_MAX_RESTARTS {nodes.max_restarts}")
    # -P: a data.py or encoders/ in the working directory must not hide ours.
    rank = [sys.executable, "-P", "-u", "-m", "mimo_train.cli", "train", launch.config, *launch.overrides]
    variables = without_torchruns(environment) | _speed(launch.cfg, environment)
    return Start(nodes, _per_node(launch.cfg, nodes), rank, variables, Path(launch.cfg.run.dir))


def launch_here(config: str, overrides: Sequence[str]) -> int:
    """Start this node's ranks and return their exit code, or become a rank if every cluster task is one.

    Raises:
        UserError: see `start_of`; or the nodes cannot join.
    """
    start = start_of(config, overrides, os.environ)
    if start.nodes.ranks is not None:
        os.execve(start.rank[0], start.rank, start.variables)
    for name in os.environ.keys() - start.variables.keys():
        del os.environ[name]
    os.environ.update(start.variables)
    from mimo_train.launch.torchrun import launch  # torch is a slow import

    return launch(start.rank, start.nodes, start.per_node, start.run_dir)


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
            "modules.*.layout (or "
            "layout=...) or NNODES, or let some be idle with placement.allow_idle=true and "
            f"NPROC_PER_NODE={-(-world // nodes)}"
        )
    return world // nodes


def _world(cfg: ConfigContainer, without_data: bool = False) -> int:
    if not without_data:
        return resolve(cfg).layout.processes[-1] + 1
    # Module sizes may come from a directory that is not on this machine.
    left_out = {*INPUT_KEYS}
    for name, module in cfg.modules.items():
        left_out |= {f"modules.{name}.{part}" for part in ("encoder", "projector", "llm") if not getattr(module, part)}
    if faults := [fault for fault in config_faults(cfg) if fault.key not in left_out]:
        raise ConfigError(faults)
    return lay_out(cfg).processes[-1] + 1


def _per_node(cfg: ConfigContainer, nodes: Nodes) -> int:
    if not nodes.per_node:
        return processes_per_node(cfg, nodes.number)
    world, started = _world(cfg), nodes.number * nodes.per_node
    if started < world:  # more may be started: the rest are idle
        given = nodes.ranks.variables[2] if nodes.ranks else "NPROC_PER_NODE"
        raise UserError(
            f"the layout needs {plural(world, 'process')}, but NNODES * {given} = {nodes.number} * {nodes.per_node} = "
            f"{started}: change modules.*.layout (or layout=...), NNODES or {given}"
        )
    return nodes.per_node


def _speed(cfg: ConfigContainer, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for speed, unless set: CPU threads, GPU queues and GPU memory."""
    if _on_cpu(cfg.run.device, environment):
        return {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or "1"}
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": environment.get("CUDA_DEVICE_MAX_CONNECTIONS") or "1"}
    if not environment.get("PYTORCH_CUDA_ALLOC_CONF"):
        variables["PYTORCH_ALLOC_CONF"] = environment.get("PYTORCH_ALLOC_CONF") or "expandable_segments:True"
    return variables


def _on_cpu(device: str, environment: Mapping[str, str]) -> bool:
    if device != "auto":
        return device == "cpu"
    if environment.get("CUDA_VISIBLE_DEVICES", "all") == "":
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode != 0
    except OSError:
        return True
