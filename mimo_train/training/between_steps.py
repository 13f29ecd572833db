"""Work between two steps: the time limit after the first, comparing replicas, ending a profile, collecting garbage."""

from megatron.core.transformer.module import MegatronModule

from mimo_train.debug.profiling import StepProfiler
from mimo_train.debug.rerun import require_equal_replicas
from mimo_train.layout.run import Run
from mimo_train.parallel.local_groups import limit_waits
from mimo_train.training.garbage import collect_when_due


class BetweenSteps:
    """Called by every rank after every step."""

    def __init__(self, run: Run, model: list[MegatronModule], profiler: StepProfiler):
        self._cfg, self._model, self._profiler = run.cfg, model, profiler
        self._step_timeout = run.cfg.run.step_timeout_minutes

    def __call__(self, step: int) -> None:
        """Do what is due after `step` steps.

        With `train.rerun`, the weights of data-parallel replicas are compared before a step that
        `checkpoint.save_interval` saves.

        Raises:
            RuntimeError: replicas hold different weights.
        """
        if self._step_timeout:
            limit_waits(self._step_timeout)
            self._step_timeout = 0.0
        interval = self._cfg.checkpoint.save_interval
        if self._cfg.train.rerun != "disabled" and interval > 0 and step % interval == 0:
            require_equal_replicas(self._model, step)
        self._profiler.after_step(step)
        collect_when_due(self._cfg.train.manual_gc_interval, step)
