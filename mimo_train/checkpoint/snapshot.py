"""A copy of what a rank saves, in host memory that is kept from one save to the next.

Fresh pages cost several times what a copy into used ones does.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from mimo_train.checkpoint.format.write import Part, in_order
from mimo_train.parallel import device as devices

_CGROUP = Path("/sys/fs/cgroup")


class Snapshot:
    """Memory for one copy of a rank's parts; none before the first, grown where that is too small."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []
        self._shape: list[tuple[torch.dtype, int]] = []

    @property
    def size(self) -> int:
        """In bytes."""
        return self._memory.numel()

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None], Callable[[], None]]:
        """Copy the values of all parts, at the values of this moment of the current stream.

        Returns:
            (parts of the copy; waits until it is there, for another thread; makes the current stream wait for it, to be
            called before the values change). On the host it is there at once.
        """
        ordered = in_order(parts)
        views = self._views_for(ordered)
        with devices.side_copies() as copied:
            for view, part in zip(views, ordered, strict=True):
                view.copy_(part.values, non_blocking=True)
        copies = [replace(part, values=view) for part, view in zip(ordered, views, strict=True)]
        return copies, copied.wait, copied.hold

    def _views_for(self, ordered: Sequence[Part]) -> list[torch.Tensor]:
        shape = [(part.values.dtype, part.span.numel) for part in ordered]
        if shape != self._shape:
            needed = sum(part.nbytes for part in ordered)
            if needed > self.size:
                self._views, self._memory = [], torch.empty(0, dtype=torch.uint8)  # before the larger one is made
                pinned = devices.current().type == "cuda"
                self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
            self._views, at = [], 0
            for part in ordered:
                self._views.append(self._memory[at : at + part.nbytes].view(part.values.dtype))
                at += part.nbytes
            self._shape = shape
        return self._views


@dataclass(frozen=True)
class Demand:
    """What a rank would need of its host's memory for a copy."""

    host: str
    nbytes: int
    """Beside what it keeps already."""
    free: int
    """Bytes of the host's, or of its container's, that nobody uses."""

    @classmethod
    def of(cls, nbytes: int, kept: int) -> "Demand":
        """That of this rank for a copy of `nbytes`, of which it keeps memory for `kept`."""
        return cls(socket.gethostname(), max(nbytes - kept, 0), free_memory())


def lacking(demands: Sequence[Demand]) -> str:
    """What the first host lacks that has not twice the memory free that its ranks need: data, evaluations and the page
    cache want some too. Empty: none lacks any."""
    needed: dict[str, int] = {}
    for one in demands:
        needed[one.host] = needed.get(one.host, 0) + one.nbytes
    for one in demands:
        if 0 < needed[one.host] and one.free < 2 * needed[one.host]:
            take, free = needed[one.host] / 1e9, one.free / 1e9
            return f"copies take {take:.3g} GB of {one.host}'s memory, of which twice that must be free, not {free:.3g}"
    return ""


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that processes of this container can still take."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit, or version 1 of control groups
        return free
    if limit == "max":
        return free
    return min(free, max(int(limit) - used + int(stat.get("inactive_file", 0)), 0))
