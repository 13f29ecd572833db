"""Manifests of clusters for a run, as plain dicts: a Job of Kubernetes, a TrainJob of Kubeflow, a task of SkyPilot.
Imports no torch."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from data.text_format import plural
from mimo_train.config.errors import UserError
from mimo_train.launch.pods import Pods, Volumes
from mimo_train.launch.requeue import AGAIN
from mimo_train.launch.restarts import ANOTHER_MACHINE, STOPPED_CODE, require_resume
from mimo_train.launch.start import Launch, processes_per_node
from mimo_train.launch.tasks import PORT

type Manifest = dict[str, Any]

GRACE, MARGIN = 240, 60
"""Seconds in which a run that is stopped must have saved, and how much longer its container stays."""
RESTARTS, RUNTIME = 3, "torch-distributed"
"""What a job and a TrainJob have where nothing else is asked for."""
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
CONTAINER = "trainer"
TRAINER = "node"
"""Name of Kubeflow's job and container of a training node, in its runtimes."""


def lost_with_machine(launch: Launch, volumes: Volumes, working: str = "") -> str:
    """What of a run is gone with the machine that it ran on, in words; empty where `run.dir` is on a volume.

    Args:
        working: the folder that a relative `run.dir` is in, if known.
    """
    run_dir, checkpoints = launch.cfg.run.dir, launch.cfg.checkpoint.dir
    if any(PurePosixPath(working, run_dir).is_relative_to(mounted) for _, mounted in volumes):
        return ""
    if checkpoints:
        return (
            f"run.dir is {run_dir}, which is on no --volume: logs and metrics are gone with the machine; checkpoints "
            f"are in {checkpoints}"
        )
    return (
        f"run.dir is {run_dir}, which is on no --volume: unless something that lasts is mounted there, checkpoints "
        "are gone with the machine, and the run begins again at step 0; give --volume NAME:FOLDER and a run.dir in "
        "FOLDER, or a URL as checkpoint.dir"
    )


def require_fit(launch: Launch, nodes: int, gpus: int) -> int:
    """Processes on each node.

    Raises:
        UserError: the layout does not fill the nodes, or the run would not continue when it is started again.
    """
    require_resume(launch.cfg.checkpoint.resume, f"{STOPPED_CODE} {AGAIN}")
    per_node = processes_per_node(launch.cfg, nodes, without_data=launch.without_data)
    if gpus and per_node != gpus:
        raise UserError(
            f"--gpus-per-node is {gpus}, and the layout has {plural(per_node, 'process')} on each of "
            f"{plural(nodes, 'node')}: change "
            "modules.*.layout (or layout=...), --nodes or --gpus-per-node"
        )
    if not gpus and launch.cfg.run.device == "cuda":
        raise UserError("--gpus-per-node is 0, and run.device is cuda")
    return per_node


def require_gpus_used(launch: Launch, asked: str, instead: str) -> None:
    """
    Args:
        asked: the option that asks for GPUs, with its value.
        instead: what to give where the run is to stay on the CPU.

    Raises:
        UserError: the run would not use them.
    """
    if launch.cfg.run.device == "cpu":
        raise UserError(f"{asked}, and run.device is cpu, which would leave the GPUs idle: give {instead}")


def indexed_job(launch: Launch, pods: Pods, folder: str, restarts: int) -> list[Manifest]:
    """A headless Service, which gives the pods names, and an Indexed Job with one pod on each node.

    A pod that fails is started again, and meets the others again. What was stopped and has saved (AGAIN), and pods that
    the cluster itself has removed, do not count as failures. For Kubernetes 1.33 and later.

    Args:
        folder: working directory; empty: the image's.
        restarts: how often a node that fails is started again.
    """
    labels = {"app.kubernetes.io/name": "mimo-train", "app.kubernetes.io/instance": pods.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": pods.name, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": pods.name},
            # Launchers look for node 0 before any pod is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "meeting", "port": PORT, "protocol": "TCP"}],
        },
    }
    nodes = {"NNODES": str(pods.nodes), "MASTER_ADDR": f"{pods.name}-0.{pods.name}", "MASTER_PORT": str(PORT)}
    container = {
        "name": CONTAINER,
        "image": pods.image,
        "command": _command(launch),
        "env": [
            *_env(nodes),
            {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            *_env(_stops()),
            *_user_env(pods),
        ],
        "resources": _resources(pods),
        "volumeMounts": _mounts(pods),
        **_security(pods),
    }
    if folder:
        container["workingDir"] = folder
    pod = {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE + MARGIN,
        "containers": [container],
        "volumes": _volumes(pods),
        **_placement(pods),
    }
    rules = [
        {"action": "FailJob", "onExitCodes": _codes(ANOTHER_MACHINE)},
        {"action": "Ignore", "onExitCodes": _codes(AGAIN)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": pods.name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.nodes,
            "parallelism": pods.nodes,
            "backoffLimitPerIndex": restarts,
            "maxFailedIndexes": 0,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [service, job]


def train_job(launch: Launch, pods: Pods, runtime: str) -> list[Manifest]:
    """A TrainJob of Kubeflow Trainer 2, whose runtime gives the pods torchrun's PET_* variables.

    Args:
        runtime: name of a ClusterTrainingRuntime of torch.
    """
    trainer = {
        "image": pods.image,
        "command": _command(launch),
        "numNodes": pods.nodes,
        "numProcPerNode": processes_per_node(launch.cfg, pods.nodes, without_data=launch.without_data),
        "resourcesPerNode": _resources(pods),
        "env": [*_env(_stops()), *_user_env(pods)],
    }
    pod = {
        "terminationGracePeriodSeconds": GRACE + MARGIN,
        "volumes": _volumes(pods),
        "containers": [{"name": TRAINER, "volumeMounts": _mounts(pods), **_security(pods)}],
        **_placement(pods),
    }
    in_job = {"name": TRAINER, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "mimo-train.dev/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [in_job]}}},
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": pods.name},
        "spec": {"runtimeRef": {"name": runtime}, "trainer": trainer, "runtimePatches": [patch]},
    }
    return [job]


def sky_task(launch: Launch, name: str, nodes: int, accelerators: str, script: str, volumes: Volumes) -> list[Manifest]:
    """A task of SkyPilot: the checkout is copied to each node, which sets up its environment and starts its ranks.

    Args:
        accelerators: as H100:8.
        script: of scripts/.
    """
    kind, _, gpus = accelerators.partition(":")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", kind) or not re.fullmatch(r"[1-9]\d*", gpus):
        raise UserError(f"--accelerators is {accelerators!r}: give a kind and a number, such as H100:8")
    require_gpus_used(launch, f"--accelerators is {accelerators}", "run.device=auto")
    require_fit(launch, nodes, int(gpus))
    task = {
        "name": name,
        "num_nodes": nodes,
        "workdir": ".",
        "resources": {
            "accelerators": accelerators,
            "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [AGAIN]},
        },
        "volumes": {folder: volume for volume, folder in volumes},
        "envs": {"MIMO_EXTRAS": "demo,gpu,remote"} | _stops(),  # checkpoints and shards are in object storage
        "setup": _SKY_SETUP,
        "run": shlex.join([f"scripts/{script}", launch.config, *launch.overrides]),
    }
    return [{key: value for key, value in task.items() if value != {}}]


# The Python of the machines' images is an older one; SkyPilot puts uv, which has every version, in ~/.local/bin.
_SKY_SETUP = """\
export PATH="$HOME/.local/bin:$PATH"
command -v python3.12 >/dev/null || uv python install 3.12
bash -c '. scripts/env.sh'
"""


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """One document for each manifest."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Values that are used twice are written twice: readers of manifests know no aliases. Several lines are written as
    lines."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _command(launch: Launch) -> list[str]:
    return ["mimo-train", "launch", "here", launch.config, *launch.overrides]


def _stops() -> dict[str, str]:
    return {STOPPED_CODE: str(AGAIN), "MIMO_GRACE_SECONDS": str(GRACE)}


def _env(variables: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _codes(code: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}


def _user_env(pods: Pods) -> list[Manifest]:
    """Variables of --env, and those of --secret."""
    secrets = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for variable, (secret, key) in pods.secrets.items()
    ]
    return [*_env(pods.env), *secrets]


def _resources(pods: Pods) -> Manifest:
    """Limits, which are requests too where a pod has no others."""
    limits = ({"nvidia.com/gpu": str(pods.gpus)} if pods.gpus else {}) | pods.limits
    return {"limits": limits} if limits else {}


def _security(pods: Pods) -> Manifest:
    """RDMA registers memory, which a container may not lock without this capability."""
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if pods.rdma else {}


def _placement(pods: Pods) -> Manifest:
    selector = {"nodeSelector": pods.node_selector} if pods.node_selector else {}
    return selector | ({"imagePullSecrets": [{"name": pods.pull_secret}]} if pods.pull_secret else {})


def _volumes(pods: Pods) -> list[Manifest]:
    """Claims, and shared memory for NCCL and for what the workers read: a container has 64 MB."""
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(pods.claims)
    ]
    return [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *claims]


def _mounts(pods: Pods) -> list[Manifest]:
    claims = [{"name": f"claim-{number}", "mountPath": folder} for number, (_, folder) in enumerate(pods.claims)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *claims]
