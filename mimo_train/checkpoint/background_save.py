"""One save, from a snapshot in host memory to a complete checkpoint, in the foreground or alongside training.

Every rank writes its part; then rank 0 commits: index, marker, name. Threads take no part in collectives: their status
travels in every step's message, so that all ranks learn it at the same step.
"""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import psutil
import torch
import torch.distributed as dist

from data.storage.url import Place
from mimo_train.checkpoint.failed_save import raise_together
from mimo_train.checkpoint.format.write import Part, in_order
from mimo_train.parallel import device as devices

LONGEST_PARTS = 3.0
"""Seconds that rank 0 of a failed run waits for parts that other ranks have almost written."""

LONGEST_CLOSE = 120.0
"""Seconds that a rank of a failed run waits for its own writes; a hanging file system may never return."""


class Job:
    """Work in a thread, or done at once."""

    def __init__(self, work: Callable[[], object], *, in_background: bool):
        """Start the work, in a thread if `in_background`."""
        self.error: BaseException | None = None
        self._work = work
        # A daemon: a hanging file system must not delay the end of the process.
        self._thread = Thread(target=self._do, name="mimo-train save", daemon=True) if in_background else None
        if self._thread is None:
            self._do()
        else:
            self._thread.start()

    def _do(self) -> None:
        try:
            self._work()
        except Exception as error:  # raised by the waiting caller
            self.error = error
        del self._work

    @property
    def is_busy(self) -> bool:
        """True while the thread works."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end; True if it has ended."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy


class InFlight:
    """A save that has begun on every rank. All ranks make the same calls; errors are raised on every rank.

    Attributes:
        folder: folder of the complete checkpoint.
        is_complete: True if all ranks know that it is complete.
    """

    NUMBER = 2
    """Numbers per rank in a step's message."""

    def __init__(
        self,
        folder: Place,
        run_dir: Place,
        write: Callable[[], object],
        commit: Callable[[], object],
        abandon: Callable[[], object],
        all_written: Callable[[], bool],
        *,
        in_background: bool,
    ):
        """Start to write.

        Args:
            write: writes this rank's part.
            commit: completes the checkpoint; called on rank 0 when all parts are written.
            abandon: called on rank 0 when the save has failed.
            all_written: True if rank 0 sees all parts in the folder.
            in_background: True to work in threads.
        """
        self.folder, self.is_complete = folder, False
        self._run_dir, self._commit, self._abandon, self._all_written = run_dir, commit, abandon, all_written
        self._in_background, self._commits, self._over = in_background, False, False
        self._is_first = dist.get_rank() == 0
        self._job = Job(write, in_background=in_background)

    def local_status(self) -> tuple[bool, bool]:
        """Return (this rank is busy with the save, the save has failed on it) for the next message."""
        return self._job.is_busy, self._job.error is not None

    def poll(self, busy: float, failed: float) -> bool:
        """Advance the save after a step's message; True if the checkpoint is complete.

        Args:
            busy, failed: sums of `local_status` over ranks, from a message sent after this save began and after the
                last call of `poll`.

        Raises:
            SaveFailed: the save has failed.
        """
        if not busy:
            self._go_on(agree=failed > 0)
        return self.is_complete

    def finish(self) -> Place:
        """Wait until the checkpoint is complete. Collective. Raises SaveFailed if the save has failed."""
        while not self._over:
            self._job.join()
            self._go_on(agree=True)
        return self.folder

    def close(self) -> None:
        """Wait up to `LONGEST_CLOSE` for this rank's work, also after a failure. Not collective. A checkpoint that all
        ranks have written is completed."""
        if not self._job.join(LONGEST_CLOSE):
            return
        if self._over or self._commits or self._job.error is not None or not self._is_first:
            return
        until = time.monotonic() + LONGEST_PARTS
        with suppress(Exception):  # the run has already failed and reports why
            while not self._all_written() and time.monotonic() < until:
                time.sleep(0.05)
            if self._all_written():
                self._commit()

    def _go_on(self, *, agree: bool) -> None:
        """Advance from writing to committing to the end. Collective if `agree`."""
        if agree:
            try:
                raise_together(self._job.error, self._run_dir)
            except BaseException:
                self._over = True
                if self._is_first:
                    with suppress(OSError):
                        self._abandon()
                raise
        if self._commits:
            self._over = self.is_complete = True
            return
        self._commits = True
        if self._is_first:
            self._job = Job(self._commit, in_background=self._in_background)


_CGROUP = Path("/sys/fs/cgroup")


class Snapshot:
    """Memory for a copy of a rank's parts, allocated on first use and grown if too small."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []
        self._shape: list[tuple[torch.dtype, int]] = []

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return self._memory.numel()

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None], Callable[[], None]]:
        """Copy the values that all parts have now on the current stream.

        Returns:
            (parts of the copy; a function with which another thread waits for the copy; a function that makes the
            current stream wait for it, to be called before the values change). On the host the copy is immediate.
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
                self._views, self._memory = (
                    [],
                    torch.empty(0, dtype=torch.uint8),
                )  # free it before allocating the larger one
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
    """Host memory that a rank needs for a copy."""

    host: str
    nbytes: int
    """Bytes in addition to what the rank keeps already."""
    free: int
    """Free bytes of the host or its container."""

    @classmethod
    def of(cls, nbytes: int, kept: int) -> "Demand":
        """Return this rank's demand for a copy of `nbytes`, of which it already keeps memory for `kept`."""
        return cls(socket.gethostname(), max(nbytes - kept, 0), free_memory())


def lacking(demands: Sequence[Demand]) -> str:
    """Return what the first host lacks whose free memory is below twice its ranks' demand; empty if none. The factor
    leaves memory for data, evaluations and the page cache."""
    needed: dict[str, int] = {}
    for one in demands:
        needed[one.host] = needed.get(one.host, 0) + one.nbytes
    for one in demands:
        if 0 < needed[one.host] and one.free < 2 * needed[one.host]:
            take, free = needed[one.host] / 1e9, one.free / 1e9
            return f"copies take {take:.3g} GB of {one.host}'s memory, of which twice that must be free, not {free:.3g}"
    return ""


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that processes of this container can still allocate."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit, or cgroups version 1
        return free
    if limit == "max":
        return free
    return min(free, max(int(limit) - used + int(stat.get("inactive_file", 0)), 0))
