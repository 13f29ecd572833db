"""The pods of a run on Kubernetes, as options of `mimo-train launch kubernetes` describe them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mimo_train.config.errors import UserError

type Volumes = tuple[tuple[str, str], ...]
"""Names of volumes, each with the folder that it is mounted at."""

LAUNCHER_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MIMO_STOPPED_CODE", "MIMO_GRACE_SECONDS")
"""Set by the manifest."""
_NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_QUALIFIED = r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*"


@dataclass(frozen=True)
class Pods:
    """The pods of a run: one on each node, all alike.

    Raises:
        UserError: a value is not one of Kubernetes; with the option.
    """

    name: str
    """Of the job: a DNS label, since pods are found by it."""
    image: str
    """With mimo-train in it."""
    nodes: int
    gpus: int
    """Of each node; 0: on the CPU."""
    claims: Volumes = ()
    """Persistent volume claims."""
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Environment variables that come from (Secret, key)."""
    cpus: int = 0
    """Of each pod; 0: not limited."""
    memory: str = ""
    """Of each pod, such as 512Gi; empty: not limited."""
    rdma: dict[str, str] = field(default_factory=dict)
    """Resources of RDMA devices, with their numbers."""
    node_selector: dict[str, str] = field(default_factory=dict)
    pull_secret: str = ""
    """Secret of the image's registry."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", self.name):
            raise UserError(f"--name is {self.name!r}: give small letters, digits and -, a letter first, at most 52")
        if not self.image or re.search(r"\s", self.image):
            raise UserError(f"--image is {self.image!r}: give the name of an image, such as registry.example/mimo:1")
        if self.memory and not re.fullmatch(r"[1-9]\d*(Mi|Gi|Ti|M|G|T)", self.memory):
            raise UserError(f"--memory must be a number with its unit, such as 512Gi, got {self.memory!r}")
        if self.pull_secret and not re.fullmatch(_NAME, self.pull_secret):
            raise UserError(f"--pull-secret must be the name of a Secret, got {self.pull_secret!r}")

    @property
    def limits(self) -> dict[str, str]:
        """Resources of a pod other than GPUs."""
        cpus = {"cpu": str(self.cpus)} if self.cpus else {}
        return cpus | ({"memory": self.memory} if self.memory else {}) | self.rdma


def volumes_of(texts: Sequence[str]) -> Volumes:
    """Volumes, each written NAME:FOLDER.

    Raises:
        UserError: one is written otherwise, or two are mounted at one folder.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, given = text.partition(":")
        folder = str(PurePosixPath(given))  # without / at the end, which SkyPilot refuses
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,60}[a-z0-9])?", name) or not re.match("/[^/]", folder):
            raise UserError(f"--volume is {text}: give its name, a colon and a folder from /, such as runs:/runs")
        if found.setdefault(folder, name) != name:
            raise UserError(f"--volume is {text}, and {found[folder]} is mounted at {folder}: give another folder")
    return tuple((name, folder) for folder, name in found.items())


def env_of(texts: Sequence[str]) -> dict[str, str]:
    """Environment variables, each written NAME=VALUE.

    Raises:
        UserError: one is written otherwise, is given twice, or is set by the manifest.
    """
    return _pairs("--env", texts, r"[A-Za-z_]\w*", ".*", "NCCL_SOCKET_IFNAME=eth0", LAUNCHER_VARIABLES)


def secrets_of(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Environment variables from Secrets, each written NAME=SECRET:KEY.

    Raises:
        UserError: see `env_of`.
    """
    key = r"[A-Za-z0-9._-]+"
    example = "WANDB_API_KEY=wandb:key"
    pairs = _pairs("--secret", texts, r"[A-Za-z_]\w*", f"{_NAME}:{key}", example, LAUNCHER_VARIABLES)
    return {variable: (value.partition(":")[0], value.partition(":")[2]) for variable, value in pairs.items()}


def node_selector_of(texts: Sequence[str]) -> dict[str, str]:
    """Labels of the nodes to use, each written KEY=VALUE.

    Raises:
        UserError: one is written otherwise, or a key is given twice.
    """
    value = r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?"
    return _pairs("--node-selector", texts, _QUALIFIED, value, "gpu.example/kind=h100")


def rdma_of(texts: Sequence[str]) -> dict[str, str]:
    """RDMA devices of a pod, each written RESOURCE=NUMBER, as the cluster's device plugin names them.

    Raises:
        UserError: one is written otherwise, or a resource is given twice.
    """
    return _pairs("--rdma", texts, r"[a-z0-9.-]+/[A-Za-z0-9][A-Za-z0-9_.-]*", r"[1-9]\d*", "rdma/ib=8")


def _pairs(
    option: str, texts: Sequence[str], name: str, value: str, example: str, reserved: Sequence[str] = ()
) -> dict[str, str]:
    """Options of the form NAME=VALUE, by regular expressions of both sides."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, content = text.partition("=")
        if not equals or not re.fullmatch(name, key) or not re.fullmatch(value, content, re.DOTALL):
            raise UserError(f"{option}: expected for example {example}, got {text!r}")
        if key in reserved:
            raise UserError(f"{option}: {key} is set by the manifest. Leave it out")
        if key in pairs:
            raise UserError(f"{option}: {key} is given twice. Leave one out")
        pairs[key] = content
    return pairs
