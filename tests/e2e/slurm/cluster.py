"""A SLURM of three nodes on one machine: its real daemons, in a folder, as the user who runs the tests.

It needs the programs of slurm and munge, whose services need not run (of Debian: slurm-wlm and munge).
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.hang import HANG_SECONDS

NODES = ("n1", "n2", "n3")
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"])
MUNGE_FILES = ("socket", "key-file", "pid-file", "log-file", "seed-file")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 Gres=gpu:2\n"
PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def missing() -> list[str]:
    """Programs that a cluster needs, and this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]


def until(what: str, happens: Callable[[], Any]) -> Any:
    """What `happens` gives as soon as that is true."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if found := happens():
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what} did not happen within {HANG_SECONDS} s")


class Cluster:
    """The daemons, from `with` on.

    Args:
        folder: an empty folder with a short path: a socket is in it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._config = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = os.environ | {"SLURM_CONF": str(self._config), "PATH": PLACES}

    def __enter__(self) -> "Cluster":
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "munge" / "key").write_bytes(os.urandom(64))
        (self.folder / "munge" / "key").chmod(0o600)
        ports = _free_ports(1 + len(NODES))
        text = CONFIG.format(ports=ports, user=getpass.getuser(), folder=self.folder)
        nodes = [NODE.format(name=name, port=port) for name, port in zip(NODES, ports[1:], strict=True)]
        self._config.write_text(text + "".join(nodes) + PARTITION)
        # Any file of a device does: runs are on the CPU, and only the numbers are looked at.
        gpus = "Name=gpu Count=2 File=/dev/tty[0-1]\n"
        (self.folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} {gpus}")
        munge = [f"--{name}={self.folder}/munge/{name.removesuffix('-file')}" for name in MUNGE_FILES]
        self._start("munged", "--foreground", "--force", *munge)
        until("munged", (self.folder / "munge" / "socket").exists)
        self._start("slurmctld", "-D", "-c", "-f", str(self._config))
        for name in NODES:
            self.start_node(name)
        until("nodes", lambda: self.state("node").count("idle") == len(NODES))
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(subprocess.SubprocessError):
            self.run("scancel", f"--user={getpass.getuser()}")
            until("the end of all jobs", lambda: not self.run("squeue", "--noheader"))
        for process in self._of_jobs():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            daemon.wait(timeout=HANG_SECONDS)

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", name, "-f", str(self._config), key=name)

    def kill_node(self, name: str) -> None:
        """End all that runs on a node, at once, as if it had lost its power."""
        tasks = [process for process in self._of_jobs() if process.environ().get("SLURMD_NODENAME") == name]
        parents = [parent for task in tasks if (parent := task.parent()) is not None]
        steps = {parent for parent in parents if parent.name().startswith("slurmstepd")}
        daemon = self._daemons[name]
        for process in [psutil.Process(daemon.pid), *steps, *tasks]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()

    def run(self, *command: str) -> str:
        """The output of one of SLURM's commands."""
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout.strip()

    def state(self, of: str) -> str:
        """States of the nodes ("node"), or of a job by its number; "" for a job that SLURM does not know."""
        if of == "node":
            return self.run("sinfo", "--Node", "--noheader", "--format=%t")
        shown = subprocess.run(["scontrol", "show", "job", of], env=self.env, capture_output=True, text=True).stdout
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")

    def start_now(self, job: str) -> None:
        """Let a job that was put back start at once: SLURM waits for two minutes."""
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _start(self, program: str, *arguments: str, key: str = "") -> None:
        path = shutil.which(program, path=PLACES)
        assert path is not None
        with open(self.folder / f"{key or program}.log", "ab") as log:
            self._daemons[key or program] = subprocess.Popen(
                [path, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env
            )

    def _of_jobs(self) -> list[psutil.Process]:
        """Processes of this cluster's jobs."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get("SLURM_CONF") == str(self._config) and "SLURM_JOB_ID" in environment:
                    found.append(process)
        return found


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
