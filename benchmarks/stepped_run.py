"""A run that makes one step per call, for measurements and tests. Programs use `mimo_train.bridge.training`."""

import time
from contextlib import ExitStack

from megatron.core.transformer.module import MegatronModule

from mimo_train.config.schema import ConfigContainer
from mimo_train.flight.file_format import CALLER
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import require_none_idle, started_run
from mimo_train.launch.rank_monitor import watched, working
from mimo_train.models.heads import ModelHook
from mimo_train.training.pretrain import default_forward_step, require_one_forward_step
from mimo_train.training.setup import setup
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.forward_step import ForwardStepCallable, prepare_forward_step_func
from mimo_train.training.step.state import StepResult
from mimo_train.training.train_step import train_step


class SteppedRun:
    """A run that is set up, or resumed from its newest checkpoint, and makes one step per call.

    It has no log, no evaluation and no checkpoints, only counts non-finite gradients, and ignores `train.skip_iters`.
    Collective: all ranks make the same calls in the same order.
    """

    def __init__(
        self,
        config: ConfigContainer,
        forward_step_func: ForwardStepCallable | None = None,
        pre_wrap_hook: ModelHook | None = None,
    ):
        """Set up the run; the arguments are those of `pretrain`."""
        votes = ExitVotes(ExitSignal(), 0, 0)
        run = started_run(config)
        if forward_step_func is not None:
            require_one_forward_step(config)
        require_none_idle(run)
        with ExitStack() as stack:
            stack.enter_context(watched(run))
            self.session = setup(run, votes, start_time=time.time(), pre_wrap_hook=pre_wrap_hook)
            RECORDER.to(CALLER)
            self._watch = stack.pop_all()
        self.step_func = prepare_forward_step_func(
            forward_step_func or default_forward_step(config), self.session.state
        )

    @property
    def model(self) -> list[MegatronModule]:
        """The model chunks of this rank."""
        return self.session.model

    def step(self) -> StepResult:
        """Make the next step."""
        session, progress = self.session, self.session.state.train_state
        with working():
            RECORDER.begin_step(progress.step + 1)
            session.freeze_stages.apply(progress.step)
            with session.parts.stopwatch("step"):
                session.data.advance()
                result = train_step(session, self.step_func)
        progress.count(session.data.current.size, session.data.current.plan.tokens, result)
        session.counts.note(session.data, result.tokens)
        return result

    def close(self) -> None:
        """End threads and writers; nothing is saved."""
        try:
            self.session.close()
        finally:
            self._watch.close()
