"""Callbacks of every run: profiler, time limit of a step, comparison of replicas, garbage collection.

Saving (`training/saving.py`) and evaluating (`training/evaluating.py`) are callbacks too; `training/loop.py` lists all.
"""

import gc
from contextlib import ExitStack

from megatron.core.transformer.module import MegatronModule

from mimo_train.config.schema import ConfigContainer
from mimo_train.debug.profiling import StepProfiler
from mimo_train.debug.rerun import require_equal_replicas
from mimo_train.parallel.groups import limit_waits
from mimo_train.training.callbacks import Callback
from mimo_train.training.shutdown import is_due
from mimo_train.training.step.state import GlobalState, StepResult


class Profiling(Callback):
    """Starts and stops the profilers of `profiling`."""

    def __init__(self, profiler: StepProfiler):
        self._profiler = profiler

    def on_step_start(self, state: GlobalState) -> None:
        self._profiler.before_step(state.train_state.step + 1)

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        self._profiler.after_step(state.train_state.step)


class StepTimeLimit(Callback):
    """Sets the time limit of collectives to `run.step_timeout_minutes` after the first step, which compiles."""

    def __init__(self, minutes: float):
        self._minutes = minutes

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        if self._minutes:
            limit_waits(self._minutes)
            self._minutes = 0.0


class ReplicaComparison(Callback):
    """Compares the weights of data-parallel replicas before they are saved; see `compare_replicas`."""

    def __init__(self, model: list[MegatronModule]):
        self._model = model

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        compare_replicas(state.cfg, self._model, state.train_state.step)


class GarbageCollection(Callback):
    """Collects garbage on all ranks after the same step, so that no rank waits for another's collector in a step.

    With an interval above 0, Python's own collector is off until the loop ends. Objects alive at the start are frozen,
    because they live for the full run.
    """

    def __init__(self, interval: int, loop: ExitStack):
        """Take `train.manual_gc_interval`, and a stack that turns Python's collector on again when the loop ends."""
        self._interval, self._loop = interval, loop

    def on_train_start(self, state: GlobalState, model: list[MegatronModule]) -> None:
        if self._interval < 1:
            return
        if gc.isenabled():
            self._loop.callback(gc.enable)
        self._loop.callback(gc.unfreeze)
        gc.disable()
        gc.collect()
        gc.freeze()

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        collect_when_due(self._interval, state.train_state.step)


def compare_replicas(cfg: ConfigContainer, model: list[MegatronModule], step: int) -> None:
    """Compare data-parallel replicas before a save, with `train.rerun`; raises RuntimeError if they differ."""
    if cfg.train.rerun != "disabled" and is_due(cfg.checkpoint.save_interval, step):
        require_equal_replicas(model, step)


def collect_when_due(interval: int, step: int) -> None:
    """Collect garbage after every `interval` steps; 0: never."""
    if is_due(interval, step):
        gc.collect()
