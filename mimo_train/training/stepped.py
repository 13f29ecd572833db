"""A run driven step by step by the caller: for benchmarks, notebooks and tests."""

import time

from megatron.core.transformer.module import MegatronModule

from mimo_train.config.schema import ConfigContainer
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import require_none_idle, started_run
from mimo_train.launch.rank_monitor import Driven
from mimo_train.models.heads import ModelHook
from mimo_train.training.exit import ExitVotes
from mimo_train.training.pretrain import default_forward_step, require_one_forward_step
from mimo_train.training.setup import setup
from mimo_train.training.step.forward_step import ForwardStepCallable, prepare_forward_step_func
from mimo_train.training.step.result import StepResult
from mimo_train.training.train_step import TrainStep


class SteppedRun:
    """A run that is set up, or resumed from its newest checkpoint, and makes one step per call.

    There is no log, no evaluation and no checkpoint between steps, and non-finite gradients are only counted.
    `train.skip_iters` is ignored. Collective over all ranks, which must make the same calls in the same order.

    Attributes:
        session: everything that the run consists of on this rank.
        step_func: the forward step as the schedule calls it.
    """

    def __init__(
        self,
        config: ConfigContainer,
        forward_step_func: ForwardStepCallable | None = None,
        pre_wrap_hook: ModelHook | None = None,
    ):
        """
        Args:
            forward_step_func: see `forward_step.ACCEPTED_FORMS`; default: `default_forward_step`.
            pre_wrap_hook: changes the model chunks before they are wrapped, see `mimo_train.models.heads`.
        """
        votes = ExitVotes(ExitSignal(), 0, 0)
        run = started_run(config)
        if forward_step_func is not None:
            require_one_forward_step(config)
        require_none_idle(run)
        self._watch = Driven()
        with self._watch.starts(run):
            self.session = setup(run, votes, start_time=time.time(), pre_wrap_hook=pre_wrap_hook)
        self.step_func = prepare_forward_step_func(
            forward_step_func or default_forward_step(config), self.session.state
        )
        self._train_step = TrainStep(self.session, self.step_func)

    @property
    def model(self) -> list[MegatronModule]:
        """The model chunks of this rank."""
        return self.session.model

    def step(self) -> StepResult:
        """Make the next step."""
        session, progress = self.session, self.session.state.train_state
        with Driven.calls():
            RECORDER.begin_step(progress.step + 1)
            session.freeze_stages.apply(progress.step)
            with session.parts.stopwatch("step"):
                session.data.advance()
                result = self._train_step()
        progress.count(session.data.current.size, session.data.current.plan.tokens, result)
        session.bad_samples.note(session.data)
        session.empty_steps.note()
        return result

    def close(self) -> None:
        """End threads and writers; nothing is saved."""
        try:
            self.session.close()
        finally:
            self._watch.close()
