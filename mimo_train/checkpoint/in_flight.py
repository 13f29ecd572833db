"""One save, from what a rank holds to a complete checkpoint, here or beside training.

Every rank writes its part; when all have, rank 0 commits: index, marker, name. No thread takes part in a collective:
what the other ranks are told of a thread travels in the message of every step, so that all know the same at one step.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import torch.distributed as dist

from data.storage.url import Place
from mimo_train.checkpoint.failed_save import raise_together

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
