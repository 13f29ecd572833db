"""Callbacks that ask a run to end, or break it, on one rank at one step."""

import os
import signal
import threading

from mimo_train.training.callbacks import Callback


class At(Callback):
    """Does something before step `step` on rank `rank`: a signal's number to send to itself, `raise`, or `launcher`,
    which kills the process that has started it."""

    def __init__(self, rank: int, step: int, what):
        self.rank, self.step, self.what = rank, step, what

    def on_step_start(self, state):
        if int(os.environ["RANK"]) != self.rank or state.train_state.step + 1 != self.step:
            return
        if self.what == "raise":
            raise RuntimeError(f"broken on purpose before step {self.step}")
        if self.what == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            return
        os.kill(os.getpid(), self.what)


class FromEnvironment(At):
    """`At` for a launched run: MIMO_TEST_BREAK is rank:step, where the rank raises, at every start again, and writes
    its part of a checkpoint only then; or rank:step:launcher, where it kills its launcher. Leaves a file `failed_RANK`
    in the run's folder."""

    def __init__(self):
        rank, step, *what = os.environ.get("MIMO_TEST_BREAK", "0:0").split(":")
        super().__init__(int(rank), int(step), *(what or ["raise"]))
        if self.what == "raise" and os.environ["RANK"] == rank and self.step:
            from mimo_train.checkpoint import store

            write, self.failed = store.write_rank, threading.Event()
            store.write_rank = lambda *arguments: self.failed.wait() and write(*arguments)

    def on_failure(self, state, error):
        if self.what == "raise" and hasattr(self, "failed"):
            self.failed.set()
        (state.run_dir / f"failed_{os.environ['RANK']}").write_text(str(error))
