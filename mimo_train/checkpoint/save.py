"""One save, from a snapshot in host memory to a complete checkpoint, in the foreground or alongside training.

Every rank writes its part; then rank 0 commits: index and marker. Threads take no part in collectives: their status
travels in every step's message, so that all ranks learn it at the same step. Errors are the same on every rank, at the
same step.
"""

import errno
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch
import torch.distributed as dist

from data.errors import DataError
from data.storage.url import Place, Url
from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.format.files import Damage, of_rank
from mimo_train.checkpoint.format.write import NotFinite, Part, complete, in_order, write_rank
from mimo_train.config.errors import PeersError, UserError
from mimo_train.parallel import device as devices

LONGEST_PARTS = 3.0
"""Seconds that rank 0 of a failed run waits for parts that other ranks have almost written."""

LONGEST_CLOSE = 120.0
"""Seconds that a rank of a failed run waits for its own writes; a hanging file system may never return."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Destination of a checkpoint, and which others are kept."""

    run_dir: Place
    """Folder or URL that contains the folder `checkpoints`."""
    step: int
    non_persistent: bool
    """True for the kind of which only the newest is kept."""
    keep: int
    """Number of checkpoints of the run to keep; 0 keeps all."""
    keep_every: int
    """Keep every step that is a multiple of this; 0 for none."""
    best: tuple[int, ...] = ()
    """Evaluated steps, the best first, with `checkpoint.keep_best`."""
    best_count: int = 0
    """Number of the best to keep."""

    def remove_old(self) -> None:
        """Remove the checkpoints that are not kept. An error is a warning. Not collective."""
        try:
            folder_changes.remove_old(
                self.run_dir, self.keep, self.non_persistent, self.keep_every, self.best, self.best_count
            )
        except OSError as error:
            _logger.warning("an old checkpoint cannot be removed (%s)", error)


class _Job:
    """Work in a thread, or done at once."""

    def __init__(self, work: Callable[[], object], *, in_background: bool):
        self.error: BaseException | None = None
        # A daemon: a hanging file system must not delay the end of the process.
        self._thread = Thread(target=self._do, args=(work,), name="mimo-train save", daemon=True)
        if in_background:
            self._thread.start()
        else:
            self._do(work)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # raised by the waiting caller
            self.error = error

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end; True if it has ended."""
        if self.is_busy:
            self._thread.join(timeout)
        return not self.is_busy


class Save:
    """A save that has begun on every rank. All ranks make the same calls; errors are raised on every rank.

    Attributes:
        folder: folder of the checkpoint.
        is_complete: True if all ranks know that it is complete.
        hold: function to call before the values of the parts change.
    """

    NUMBER = 2
    """Numbers per rank in a step's message."""

    def __init__(
        self,
        target: Target,
        parts: list[Part],
        record: dict[str, Any],
        sizes: Sequence[int],
        snapshot: "Snapshot | None",
    ):
        """Create the folder and start to write this rank's parts. Collective.

        Args:
            record: the run's record; used by rank 0.
            sizes: bytes that each rank writes.
            snapshot: memory for a copy that a thread writes; None writes at once.

        Raises:
            SaveFailed: the folder cannot be created, lacks space, or is not visible to a rank.
        """
        self._target, self._record, self._sizes = target, record, sizes
        self.folder = _create_folder(target, sum(sizes))
        self._in_background, self.is_complete = snapshot is not None, False
        self._commits = self._over = False
        self._is_first = dist.get_rank() == 0
        self.hold: Callable[[], None] = lambda: None
        wait, copies = self.hold, parts
        if snapshot is not None:
            copies, wait, self.hold = snapshot.take(parts)
        # Device tensors must live until their background copy is done.
        sources = [] if snapshot is None else [*parts]

        def write() -> None:
            wait()
            sources.clear()
            write_rank(self.folder, dist.get_rank(), copies)

        self._job = _Job(write, in_background=self._in_background)

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
            self._advance(agree=failed > 0)
        return self.is_complete

    def finish(self) -> Place:
        """Wait until the checkpoint is complete. Collective. Raises SaveFailed if the save has failed."""
        while not self._over:
            self._job.join()
            self._advance(agree=True)
        return self.folder

    def close(self) -> None:
        """Wait up to `LONGEST_CLOSE` for this rank's work, also after a failure. Not collective. A checkpoint that all
        ranks have written is completed."""
        if not self._job.join(LONGEST_CLOSE):
            return
        if self._over or self._commits or self._job.error is not None or not self._is_first:
            return
        until = time.monotonic() + LONGEST_PARTS
        listings = {of_rank(rank)[1] for rank in range(len(self._sizes))}
        with suppress(Exception):  # the run has already failed and reports why
            while not (written := listings <= folders.contents(self.folder).names) and time.monotonic() < until:
                time.sleep(0.05)
            if written:
                self._commit()

    def _commit(self) -> None:
        """Complete the checkpoint and remove old ones. On rank 0, when all parts are written."""
        target = self._target
        text = folders.record_text(self._record)  # here, because it takes as long as copying 40 MB
        complete(self.folder, len(self._sizes), {folders.RECORD: text}, self._sizes)
        target.remove_old()

    def _advance(self, *, agree: bool) -> None:
        """Advance from writing to committing to the end. Collective if `agree`."""
        if agree:
            try:
                raise_together(self._job.error, self._target.run_dir)
            except BaseException:
                self._over = True
                if self._is_first:
                    with suppress(OSError):
                        folder_changes.remove(self.folder)
                raise
        if self._commits:
            self._over = self.is_complete = True
            return
        self._commits = True
        if self._is_first:
            self._job = _Job(self._commit, in_background=self._in_background)


def _create_folder(target: Target, nbytes: int) -> Place:
    """Create the folder to write into on rank 0, and return it. Collective.

    Raises:
        SaveFailed: it cannot be created, lacks space, or is not visible to this rank; on every rank.
    """
    box = list[Any]([None])

    def make() -> None:
        if dist.get_rank() == 0:
            box[0] = folder_changes.begin(target.run_dir, target.step, target.non_persistent, nbytes)

    raise_together(_Job(make, in_background=False).error, target.run_dir)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    look = _Job(lambda: folder_changes.require_begun(box[0]), in_background=False)
    raise_together(look.error, target.run_dir)
    return box[0]


class SaveFailed(UserError):
    """A checkpoint could not be written; earlier ones are unchanged.

    Attributes:
        is_final: True if later saves will fail too.
    """

    def __init__(self, text: str, is_final: bool = False):
        super().__init__(text)
        self.is_final = is_final


class PeersSaveFailed(SaveFailed, PeersError):
    """SaveFailed of another rank."""


def raise_together(error: BaseException | None, run_dir: Place) -> None:
    """Raise any rank's error on every rank, with the text of the lowest such rank. Collective.

    Raises:
        SaveFailed: a peer's is a PeersError too.
        BaseException: `error`, if a user cannot cause it. Other ranks then raise a PeersError that is no SaveFailed:
            the run cannot continue without that rank.
    """
    failure, bug = None, ""
    if error is not None and (failure := _save_failure(error, run_dir)) is None:
        bug = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    local = bug, str(failure or ""), failure is not None and failure.is_final
    ranks = [local]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, local)
    if bug and error is not None:
        raise error
    for peers_bug, *_ in ranks:
        if peers_bug:
            raise PeersError(peers_bug) from error
    for rank, (_, text, is_final) in enumerate(ranks):
        if text and failure is not None and (len(ranks) == 1 or rank == dist.get_rank()):
            raise failure from error
        if text:
            raise PeersSaveFailed(text, is_final) from error


def _save_failure(error: BaseException, run_dir: Place) -> SaveFailed | None:
    """Return the user's message for a save error; None if a user cannot cause it."""
    if isinstance(error, NotFinite):
        text = (
            f"no checkpoint of this step is written: weights are not finite: {error}; the newest checkpoint is as it "
            "was: continue from it with a smaller optim.lr or optim.weight_decay"
        )
        return SaveFailed(text, is_final=True)
    if not isinstance(error, OSError | Damage):
        return None
    what, remedy = f"a checkpoint cannot be written to {run_dir} ({error})", "mend that"
    if full := _disk_error(error, run_dir):
        what, remedy = f"{run_dir} cannot take more files ({full})", "free space, or lower checkpoint.keep"
    return SaveFailed(f"{folders.key_of(run_dir)}: {what}: {remedy}; complete checkpoints are as they were")


def full_disk(error: BaseException, run_dir: Place) -> UserError | None:
    """Return the error to raise instead if a full disk or quota of `run_dir` is the cause; else None."""
    if not (full := _disk_error(error, run_dir)):
        return None
    return UserError(
        f"run.dir: {run_dir} cannot take more files ({full}): free space, or lower checkpoint.keep, and the same "
        "command continues the run from its newest complete checkpoint; those are as they were"
    )


def _disk_error(error: BaseException, run_dir: Place) -> str:
    """Return the system's message if a full disk or quota of `run_dir` caused the error; else an empty string."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(run_dir, Url):
            name = cause.filename
            if not isinstance(name, str) or Path(name).absolute().is_relative_to(run_dir.absolute()):
                return cause.strerror or os.strerror(cause.errno)
    return ""


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, which may lead back to it. Data errors and what is behind them are left out: they
    name their own folder, which may be on another disk."""
    causes: list[BaseException] = []
    while error is not None and error not in causes and not isinstance(error, DataError):
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


class Snapshot:
    """Memory for a copy of a rank's parts, allocated on first use and grown if too small."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

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
        needed = sum(part.nbytes for part in parts)
        if needed > self.size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before allocating the larger one
            pinned = devices.current().type == "cuda"
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
        copies, start = [], 0
        with devices.side_copies() as copied:
            for part in in_order(parts):
                view = self._memory[start : start + part.nbytes].view(part.values.dtype)
                view.copy_(part.values, non_blocking=True)
                copies.append(replace(part, values=view))
                start += part.nbytes
        return copies, copied.wait, copied.hold


Demand = tuple[str, int, int]
"""Host, bytes that a rank needs there in addition to its memory for copies, and free bytes of host or container."""


def memory_demand(nbytes: int, snapshot: Snapshot) -> Demand:
    """Return this rank's demand for a copy of `nbytes`."""
    return socket.gethostname(), max(nbytes - snapshot.size, 0), free_memory()


def memory_shortage(demands: Sequence[Demand]) -> str:
    """Return what the first host lacks whose free memory is below twice its ranks' demand; empty if none. The factor
    leaves memory for data, evaluations and the page cache."""
    needed = Counter[str]()
    for host, nbytes, _ in demands:
        needed[host] += nbytes
    for host, _, free in demands:
        if needed[host] and free < 2 * needed[host]:
            return (
                f"copies take {needed[host] / 1e9:.3g} GB of {host}'s memory, of which twice that must be free, not "
                f"{free / 1e9:.3g}"
            )
    return ""


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
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
