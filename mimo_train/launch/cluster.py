"""Fill in the templates of configs/cluster/, which start `mimo-train launch here` on each node of a cluster."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from string import Template

from data.text_format import plural
from mimo_train.config.errors import UserError
from mimo_train.config.run_files import shipped_configs
from mimo_train.launch.restarts import AGAIN, STOPPED_CODE, require_resume
from mimo_train.launch.start import Launch, processes_per_node

MOUNT = "mount"
"""Template value that names the folder of a shared volume."""


def fill_in(template: str, launch: Launch, nodes: int, gpus: int, values: Mapping[str, str]) -> str:
    """Return the text of a template with a run's values filled in.

    Args:
        template: name of a file in configs/cluster/, or a path. It may use `${name}`, `${nodes}`, `${gpus}` and
            `${processes}` (per node), `${command}` (a list), `${run}` (a shell line) and any of `values`.
        gpus: GPUs per node; 0 runs on the CPU.
        values: other values by name.

    Raises:
        UserError: the layout does not fill the nodes, the run would not resume after a restart, or a value is missing
            or unknown.
    """
    path = _template(template)
    command = [launch.config, *launch.overrides]
    of_run = {
        "nodes": str(nodes),
        "gpus": str(gpus),
        "processes": str(_require_fit(launch, nodes, gpus)),
        "command": json.dumps(["mimo-train", "launch", "here", *command]),
        "run": json.dumps(shlex.join(["scripts/train_vlm.sh", *command])),
    }
    if taken := sorted(of_run.keys() & values.keys()):
        raise UserError(
            f"--set {taken[0]}: the run decides this value. Change the config or the options of the command."
        )
    text = Template(path.read_text())
    names = text.get_identifiers()
    for name, value in values.items():
        if name not in names:
            raise UserError(f"--set {name}: {path} has no ${{{name}}}. It has {', '.join(names)}.")
        if not re.fullmatch(r"[\w./:@+-]+", value):
            raise UserError(f"--set {name}: expected letters, digits and ./:@+-, got {value!r}")
    filled = {"name": "mimo-train", **values, **of_run}
    if missing := [name for name in names if name not in filled]:
        raise UserError(f"{path} needs {', '.join(missing)}: add " + " ".join(f"--set {name}=..." for name in missing))
    return text.substitute(filled)


def _template(name: str) -> Path:
    shipped = shipped_configs() / "cluster"
    for path in (shipped / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    raise UserError(f"no template {name!r}: give {names}, or the path of a file")


def _require_fit(launch: Launch, nodes: int, gpus: int) -> int:
    require_resume(launch.cfg.checkpoint.resume, f"{STOPPED_CODE} {AGAIN}")
    processes = processes_per_node(launch.cfg, nodes, without_data=launch.without_data)
    if gpus and processes != gpus:
        raise UserError(
            f"--gpus-per-node is {gpus}, and the layout has {plural(processes, 'process')} on each of "
            f"{plural(nodes, 'node')}: change modules.*.layout (or layout=...), --nodes or --gpus-per-node"
        )
    return processes


def lost_with_machine(launch: Launch, values: Mapping[str, str]) -> str:
    """Return a sentence about what is lost with the machines; empty if `run.dir` is on the shared volume."""
    run_dir, checkpoints = launch.cfg.run.dir, launch.cfg.checkpoint.dir
    if MOUNT in values and PurePosixPath(run_dir).is_relative_to(values[MOUNT]):
        return ""
    lost = f"run.dir is {run_dir}, which is not in the shared volume ({values.get(MOUNT, 'none')})"
    if checkpoints:
        return f"{lost}: logs and metrics are lost with the machine; checkpoints are in {checkpoints}"
    return (
        f"{lost}: checkpoints are lost with the machine, and the run begins again at step 0. Set run.dir to a folder "
        "in the volume, or checkpoint.dir to a URL."
    )
