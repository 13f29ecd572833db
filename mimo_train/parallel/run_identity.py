"""Set-up checks that all ranks were started for the same run and see the same folder."""

import copy
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mimo_train.config.compose import leaves, to_dict
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.parallel.collectives import agreed

LISTED = 5
"""Maximum number of keys in a message."""

LONGEST_SIGHT = 70.0
"""Seconds that a rank on another host waits for a file of rank 0. NFS may cache a folder's listing for a minute
(`acdirmax`)."""

_NOT = "not set"


@dataclass(frozen=True)
class Start:
    """The facts that a rank tells the others when it starts."""

    config: dict[str, Any]
    """The config without folders that may differ between nodes: caches."""
    host: str = field(default_factory=socket.gethostname)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """A random tag; rank 0 writes its own into the lock of `run.dir`."""

    @classmethod
    def of(cls, cfg: ConfigContainer) -> "Start":
        """Return the start of this process."""
        plain = copy.deepcopy(to_dict(cfg))
        plain["data"]["cache_dir"] = ""
        for module in plain["modules"].values():
            module["feature_cache"]["dir"] = bool(module["feature_cache"]["dir"])
        return cls(plain)


def require_one_config(starts: Sequence[Start]) -> None:
    """Raise ConfigError on every rank, with the keys and both values, if a rank was started with another config than
    rank 0."""
    other = next((rank for rank, start in enumerate(starts) if start.config != starts[0].config), None)
    if other is None:
        return
    first, second = (dict(leaves(starts[rank].config)) for rank in (0, other))
    keys = [key for key in {**first, **second} if first.get(key, _NOT) != second.get(key, _NOT)]
    places = [f"rank {rank} on {starts[rank].host}" for rank in (0, other)]
    faults = [
        Fault(
            key,
            f"is {first.get(key, _NOT)!r} for {places[0]}, and {second.get(key, _NOT)!r} for {places[1]}: start "
            "all ranks with the same config and overrides",
        )
        for key in keys[:LISTED]
    ]
    if len(keys) > LISTED:
        faults.append(Fault("", f"{len(keys) - LISTED} more keys differ"))
    raise ConfigError(faults)


def require_one_folder(file: Path, starts: Sequence[Start], patience: float = LONGEST_SIGHT) -> None:
    """Check that every rank sees a file that rank 0 has just written. Collective over all ranks.

    Args:
        file: the lock of `run.dir`, with the tag of rank 0 in it.
        patience: seconds that a rank on another host than rank 0 waits for it.

    Raises:
        UserError: a rank does not see it, so its part of a checkpoint would be lost.
    """
    if len(starts) == 1:
        return
    rank = dist.get_rank()
    with agreed():
        # Not on rank 0: closing the file there would free the lock.
        if rank == 0 or _sees(file, starts[0].mark, patience if starts[rank].host != starts[0].host else 0.0):
            return
        hosts = len({start.host for start in starts})
        raise UserError(
            f"run.dir: rank {rank} on {starts[rank].host} does not see what rank 0 on {starts[0].host} writes into "
            f"{file.parent.absolute()}: give a folder on a file system that all hosts of this run share ({hosts})"
        )


def _sees(file: Path, mark: str, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            os.listdir(file.parent)  # asks the server again
            if mark in file.read_text(errors="replace"):
                return True
        except OSError:
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(1.0, patience))
