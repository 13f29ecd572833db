"""The states, at Megatron-Bridge's path, and the state that the documented functions take."""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mimo_train.debug.nan_policy import NanPolicy
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.log import StepLog
from mimo_train.training.saving import Saver
from mimo_train.training.setup import Session
from mimo_train.training.step.forward_step import ForwardStepCallable
from mimo_train.training.step.state import GlobalState, StepResult, TrainState
from mimo_train.training.train_step import forward_backward

__all__ = ["GlobalState", "SessionState", "TrainState", "session_of"]


@dataclass
class SessionState(GlobalState):
    """`GlobalState` of a run that `mimo_train.bridge.training.setup.setup` has set up.

    Attributes:
        result: the result of the last `train_step`.
        step_is_empty: 1 if no token of that step has a loss, else 0; 0-d on the device.
        step_seconds: durations of the latest steps, newest last.
    """

    session: Session = field(kw_only=True, repr=False)
    callbacks: Callbacks = field(kw_only=True, default_factory=Callbacks)
    saver: Saver = field(init=False)
    log: StepLog = field(init=False)
    result: StepResult = field(init=False, default_factory=StepResult)
    step_is_empty: torch.Tensor | None = field(init=False, default=None)
    step_seconds: deque[float] = field(init=False)
    _nan_policy: NanPolicy | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.session = replace(self.session, state=self)
        self.saver, self.log = Saver(self.session, self.callbacks), StepLog(self.session, self.callbacks)
        self.step_seconds = deque(maxlen=self.cfg.log.throughput_window + 1)

    @property
    def straggler_timer(self) -> Any:
        """The `StragglerTimer` of the log, else a context manager that measures nothing."""
        return self.log.stragglers or super().straggler_timer

    @classmethod
    def of(cls, session: Session, callbacks: Callbacks) -> "SessionState":
        """Return the state of a session; it shares progress, timers and loggers with the session's own."""
        state = session.state
        return cls(
            state.run,
            state.train_state,
            state.timers,
            state.start_time,
            state.metrics,
            state.console,
            state.data_ends,
            session=session,
            callbacks=callbacks,
        )

    def nan_policy(self, forward_step: ForwardStepCallable) -> NanPolicy:
        """Return the policy that applies `train.on_nan` to the next step, which calls `forward_step`."""
        session = self.session
        parts = (session.parts.pipeline, session.optimizer, session.losses)
        run_microbatches = partial(forward_backward, *parts, forward_step)
        if self._nan_policy is None:
            save = partial(self.saver.save_apart, session.data)
            self._nan_policy = NanPolicy(self, *parts, run_microbatches, save)
        self._nan_policy.forward_backward = run_microbatches
        return self._nan_policy

    def count_step(self, result: StepResult, seconds: float) -> None:
        """Count the consumption of a step, without `train_state.step`. Raises TooManyBadSamples or UserError on every
        rank if there are more bad samples or empty steps than the config allows."""
        session, progress = self.session, self.train_state
        self.result = result
        if result.should_exit:  # the step was not made
            session.data.put_back()
            return
        self.step_seconds.append(seconds)
        progress.consumed_train_tokens += session.data.current.plan.tokens
        progress.skipped_iters += result.skipped_iter
        self.count_samples()
        self.step_is_empty = session.counts.note(session.data, result.tokens)
        session.counts.require_budget()

    def count_samples(self) -> None:
        """Set the number of consumed samples to the position of the data, overriding the caller's count."""
        if (position := self.session.data.consumed_samples) is not None:
            self.train_state.consumed_train_samples = position


def session_of(state: GlobalState, function: str) -> Session:
    """Return the session of a state; raises TypeError for states that `setup` did not return."""
    if not isinstance(state, SessionState):
        raise TypeError(
            f"{function}: expected the state that mimo_train.bridge.training.setup.setup returns, got "
            f"{type(state).__name__}. Call setup first; a run of pretrain does this work by itself"
        )
    return state.session
