"""Callbacks that ask a run to end, or break it, on one rank at one step."""

import os
import signal
import threading
import time
from pathlib import Path

from mimo_train.training.callbacks import Callback


class At(Callback):
    """Does something before step `step` on rank `rank`: a signal's number to send to itself, or `raise`."""

    def __init__(self, rank: int, step: int, what):
        self.rank, self.step, self.what = rank, step, what

    def on_step_start(self, state):
        if int(os.environ["RANK"]) != self.rank or state.train_state.step + 1 != self.step:
            return
        if self.what == "raise":
            raise RuntimeError(f"broken on purpose before step {self.step}")
        os.kill(os.getpid(), self.what)


class FromEnvironment(At):
    """`At` for a launched run: MIMO_TEST_BREAK is rank:step, where the rank raises, at every start again, and writes
    its part of a checkpoint only then. Leaves a file `failed_RANK` in the run's folder."""

    def __init__(self):
        rank, step = os.environ.get("MIMO_TEST_BREAK", "0:0").split(":")
        super().__init__(int(rank), int(step), "raise")
        if os.environ["RANK"] == rank and self.step:
            from mimo_train.checkpoint import save as saves

            write, self.failed = saves.write_rank, threading.Event()
            saves.write_rank = lambda *arguments: self.failed.wait() and write(*arguments)

    def on_failure(self, state, error):
        if hasattr(self, "failed"):
            self.failed.set()
        (state.run_dir / f"failed_{os.environ['RANK']}").write_text(str(error))


KILLED = "killed"
"""File in the working directory: what was about to be done when `KillsFromEnvironment` killed."""


class KillsFromEnvironment(Callback):
    """kill -9 in a launched run. MIMO_TEST_KILL is rank:who:save:number, where who, `rank` or `launcher`, is killed in
    the place of that call by which the rank writes checkpoints, or rank:who:step:number, before that step."""

    def __init__(self):
        rank, self._who, where, at = os.environ.get("MIMO_TEST_KILL", "-1:rank:step:0").split(":")
        mine = rank == os.environ["RANK"]
        self._step = int(at) if mine and where == "step" else -1
        if mine and where == "save":
            from disk_faults import DiskCalls  # beside this file in the working directory of a launched run

            self._calls = DiskCalls(int(at), lambda: self._kill(self._calls.named)).install()

    def on_step_start(self, state):
        if state.train_state.step + 1 == self._step:
            self._kill(f"step {self._step}")

    def _kill(self, place: str):
        Path(KILLED).write_text(place)
        os.kill(os.getppid() if self._who == "launcher" else os.getpid(), signal.SIGKILL)
        if self._who == "launcher":
            time.sleep(2)  # in which both ranks notice; if they do not, nothing is lost
