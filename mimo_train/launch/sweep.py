"""Sweeps: a run for each combination of values, here one after the other or several at once, or as a SLURM array.

Task N, counted from 1, is the line N of `sweep.txt` in the sweep's folder, and writes into `task_N` of it, wherever it
runs. So a sweep that was begun here can continue as an array (`start.ARRAY_FILE`), and the other way round.
"""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.storage.files import replacing
from data.text_format import plural
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.launch.exit_signal import interrupted_by_sigterm
from mimo_train.launch.start import ARRAY_FILE, launch_of, processes_per_node
from mimo_train.layout.run import config_faults
from mimo_train.logging import progress
from mimo_train.logging.console import duration

FILE = "sweep.txt"
_POLL_SECONDS = 0.2
_OF_ARRAY = (ARRAY_FILE, "SLURM_ARRAY_TASK_ID")
"""Variables that change a run's folder and keys, also of a job in which a sweep runs."""
_LAST_LINES = 5
"""Lines of the log of a task that failed, which are printed."""


@dataclass(frozen=True)
class Task:
    """A run of a sweep."""

    number: int
    overrides: list[str]
    run_dir: Path
    cfg: ConfigContainer

    @property
    def is_finished(self) -> bool:
        """True if its run has made all steps, or was stopped early."""
        last = progress.last_exit(self.run_dir)
        step, iters = last.get("step", ""), self.cfg.train.iters
        is_long_enough = "stop_early" in last or (step.isdecimal() and int(step) >= iters)
        return last.get("reason") == progress.FINISHED and is_long_enough

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def __str__(self) -> str:
        return f"task {self.number} ({' '.join(self.overrides)})"


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep."""

    config: str
    overrides: list[str]
    folder: Path
    tasks: list[Task]

    @property
    def remaining(self) -> list[Task]:
        """The tasks that are not finished."""
        return [task for task in self.tasks if not task.is_finished]


def combinations(sweeps: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each combination of `KEY=VALUE,VALUE,...`, the last key varying fastest.

    Raises:
        UserError: a sweep has another form, names a key or value twice, or names `run.dir`.
    """
    keys: list[list[str]] = []
    names: list[str] = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        split = _split(values)
        if not equals or not key or not all(split):
            raise UserError(f"--sweep: expected KEY=VALUE,VALUE,..., got {text!r}")
        if key == "run.dir":
            raise UserError("--sweep: run.dir is that of the sweep, whose tasks have folders in it. Remove it")
        if key in names or len(set(split)) < len(split):
            raise UserError(f"--sweep: {key} has a value twice, or is given twice: {text}")
        names.append(key)
        keys.append([f"{key}={value}" for value in split])
    return [list(task) for task in itertools.product(*keys)]


def _split(text: str) -> list[str]:
    """Split at commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{(") - (character in "]})") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def open_sweep(config: str, overrides: Sequence[str], sweeps: Sequence[str]) -> Sweep:
    """Return the sweep in the `run.dir` of the config, and write its file of tasks.

    Raises:
        UserError: the config of a task has errors, tasks share checkpoints, or the folder has another sweep or a run.
    """
    folder = Path(launch_of(config, overrides, None, {}).cfg.run.dir)
    tasks, faults = [], dict[str, str]()
    for number, changes in enumerate(combinations(sweeps), start=1):
        run_dir = folder / f"task_{number}"
        try:
            cfg = launch_of(config, [*overrides, *changes, f"run.dir={run_dir}"], None, {}).cfg
            wrong = list(config_faults(cfg))
            tasks.append(Task(number, changes, run_dir, cfg))
        except ConfigError as error:
            wrong = error.faults
        for fault in wrong:
            faults.setdefault(str(fault), f"--sweep: {fault} (in {' '.join(changes)})")
    if faults:
        raise UserError("\n".join(faults.values()))
    stores = [task.cfg.checkpoint.dir for task in tasks if task.cfg.checkpoint.dir]
    if shared := next((store for store in stores if stores.count(store) > 1), None):
        text = f"{shared} is that of several tasks, which would resume from each other's checkpoints"
        raise UserError(f"checkpoint.dir: {text}. Remove it, or sweep it alone with a place for each task")
    _write_file(folder, [shlex.join(task.overrides) for task in tasks])
    return Sweep(config, list(overrides), folder, tasks)


def _write_file(folder: Path, lines: Sequence[str]) -> None:
    """Write the file of tasks. Raises UserError if the folder has other tasks or a run, or cannot be written."""
    text, path = "".join(f"{line}\n" for line in lines), folder / FILE
    try:
        if path.exists():
            if path.read_text() != text:
                raise UserError(f"run.dir: {folder} has another sweep, see {path}. Set run.dir to a new folder")
            return
        if (folder / progress.PROGRESS_FILE).exists():
            raise UserError(f"run.dir: {folder} is the folder of a run. Set run.dir to a new folder for the sweep")
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be written ({error}). Set run.dir to a folder that can be") from error


def slurm_command(sweep: Sweep, at_once: int) -> str:
    """Return the command that submits the remaining tasks as a SLURM array; at most `at_once` at a time, 0: all."""
    numbers = ",".join(str(task.number) for task in sweep.remaining)
    limit = f"%{at_once}" if at_once else ""
    overrides = [text for text in sweep.overrides if not text.startswith("run.dir=")]
    words = ["sbatch", f"--array={numbers}{limit}", "scripts/slurm/train_vlm.sbatch", sweep.config]
    words += [*overrides, f"run.dir={sweep.folder.resolve()}"]
    return f"{ARRAY_FILE}={shlex.quote(str((sweep.folder / FILE).resolve()))} {shlex.join(words)}"


def run_here(sweep: Sweep, at_once: int = 1, tell: Callable[[str], None] = print) -> list[Task]:
    """Run the remaining tasks on this machine, and return those that failed.

    A signal is passed on to the tasks, which save and end; it is raised again as KeyboardInterrupt.

    Args:
        at_once: most tasks at a time. On GPUs each gets its own.

    Raises:
        UserError: there are fewer GPUs than the tasks need.
        KeyboardInterrupt: a signal ended the sweep.
    """
    remaining, failed = sweep.remaining, list[Task]()
    if skipped := len(sweep.tasks) - len(remaining):
        tell(f"{plural(skipped, 'task')} of {len(sweep.tasks)} finished before")
    slots = _slots(remaining, min(at_once, len(remaining)), os.environ)
    running: dict[int, tuple[Task, subprocess.Popen[bytes], float]] = {}
    with interrupted_by_sigterm():
        try:
            while remaining or running:
                for slot, devices in enumerate(slots):
                    if slot not in running and remaining:
                        task = remaining.pop(0)
                        tell(f"{task}: started, output in {task.log}")
                        running[slot] = task, _start(sweep, task, devices), time.monotonic()
                for slot, (task, process, began) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        seconds = duration(time.monotonic() - began)
                        if process.returncode or not task.is_finished:
                            failed.append(task)
                            tell(f"{task}: not finished, exit code {process.returncode} after {seconds}")
                            tell("".join(f"  {line}\n" for line in _last_lines(task.log)).rstrip("\n"))
                        else:
                            tell(f"{task}: finished in {seconds}")
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            for _, process, _ in running.values():
                process.send_signal(signal.SIGTERM)
            for _, process, _ in running.values():
                process.wait()
            raise
    return failed


def _start(sweep: Sweep, task: Task, devices: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-u", "-m", "mimo_train.cli", "launch", "here", sweep.config]
    command += [*sweep.overrides, *task.overrides, f"run.dir={task.run_dir}"]
    with task.log.open("ab") as log:
        # In a session of its own: a Ctrl-C of the terminal reaches it once, through this process.
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        environment = {name: value for name, value in os.environ.items() if name not in _OF_ARRAY}
        return subprocess.Popen(command, stdout=log, env={**environment, **devices}, **options)


def _last_lines(log: Path) -> list[str]:
    with suppress(OSError):
        return log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return []


def _slots(tasks: Sequence[Task], at_once: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables of each of the tasks that run at once: its GPUs, if there are any to share."""
    if at_once < 2 or all(task.cfg.run.device == "cpu" for task in tasks):
        return [{}] * at_once
    gpus = visible_gpus(environment)
    if not gpus:
        return [{}] * at_once
    each = max(processes_per_node(task.cfg, 1) for task in tasks)
    if len(gpus) < each * at_once:
        raise UserError(
            f"--at-once: {at_once} tasks of {plural(each, 'process')} need {each * at_once} GPUs, and there are "
            f"{len(gpus)}. Set --at-once {max(1, len(gpus) // each)}"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[at * each : (at + 1) * each])} for at in range(at_once)]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process of this environment sees, without importing torch."""
    if (names := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    try:
        lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, _ in enumerate(line for line in lines.splitlines() if line.startswith("GPU "))]
