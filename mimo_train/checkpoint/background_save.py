"""One save, from a snapshot in host memory to a complete checkpoint, in the foreground or next to training.

Every rank writes its part; when all have, rank 0 commits: index, marker, name. No thread takes part in a collective:
what the other ranks are told of a thread travels in the message of every step, so that all know the same at one step.
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
"""Seconds that rank 0 waits, at the end of a run that has failed, for parts of others that are almost written."""

LONGEST_CLOSE = 120.0
"""Seconds that a rank waits, at the end of a run that has failed, for what it writes itself: a file system that hangs
may never return."""


class Job:
    """Work in a thread, or at once."""

    def __init__(self, work: Callable[[], object], *, beside: bool):
        """`beside`: in a thread."""
        self.error: BaseException | None = None
        self._work = work
        # The end of the process does not wait for a file system that hangs.
        self._thread = Thread(target=self._do, name="mimo-train save", daemon=True) if beside else None
        if self._thread is None:
            self._do()
        else:
            self._thread.start()

    def _do(self) -> None:
        try:
            self._work()
        except Exception as error:  # raised where it is waited for
            self.error = error
        del self._work

    @property
    def is_busy(self) -> bool:
        """Whether it goes on."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end, not longer than `timeout` seconds; whether it has come."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_busy


class InFlight:
    """A save that has begun on every rank. All ranks make the same calls; those that raise, raise on every rank.

    Attributes:
        folder: of the checkpoint, when it is complete.
        is_complete: whether it is, as all ranks know.
    """

    NUMBER = 2
    """Numbers of a rank in a step's message."""

    def __init__(
        self,
        folder: Place,
        run_dir: Place,
        write: Callable[[], object],
        commit: Callable[[], object],
        abandon: Callable[[], object],
        all_written: Callable[[], bool],
        *,
        beside: bool,
    ):
        """
        Args:
            write: writes this rank's part.
            commit: completes the checkpoint; called on rank 0, when all parts are written.
            abandon: called on rank 0 when the save has failed.
            all_written: whether all parts are in the folder, as rank 0 sees it.
            beside: whether this goes on in threads.
        """
        self.folder, self.is_complete = folder, False
        self._run_dir, self._commit, self._abandon, self._all_written = run_dir, commit, abandon, all_written
        self._beside, self._commits, self._over = beside, False, False
        self._is_first = dist.get_rank() == 0
        self._job = Job(write, beside=beside)

    def own(self) -> tuple[bool, bool]:
        """(this rank is busy with it, has failed in it): for the next message."""
        return self._job.is_busy, self._job.error is not None

    def heard(self, busy: float, failed: float) -> bool:
        """
        Args:
            busy, failed: sums over ranks of what `own` was at the last message; the message was sent after this save
                began, and after it was heard of the last time.

        Returns:
            Whether the checkpoint is complete.

        Raises:
            SaveFailed: it will not be.
        """
        if not busy:
            self._go_on(agree=failed > 0)
        return self.is_complete

    def finish(self) -> Place:
        """Wait until it is complete. Collective.

        Raises:
            SaveFailed: it will not be.
        """
        while not self._over:
            self._job.join()
            self._go_on(agree=True)
        return self.folder

    def close(self) -> None:
        """Wait for what this rank does, up to `LONGEST_CLOSE`, after a failure too: not collective. A checkpoint that
        all ranks have written is completed."""
        if not self._job.join(LONGEST_CLOSE):
            return
        if self._over or self._commits or self._job.error is not None or not self._is_first:
            return
        until = time.monotonic() + LONGEST_PARTS
        with suppress(Exception):  # the run has failed already, and says why
            while not self._all_written() and time.monotonic() < until:
                time.sleep(0.05)
            if self._all_written():
                self._commit()

    def _go_on(self, *, agree: bool) -> None:
        """From writing to committing, and from there to the end. Collective if `agree`, and where `heard` says so."""
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
            self._job = Job(self._commit, beside=self._beside)


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
