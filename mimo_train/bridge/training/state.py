"""The states, at the path that Megatron-Bridge gives them, and the one that the documented functions take."""

from dataclasses import dataclass, field, replace
from typing import Any

from mimo_train.step.state import GlobalState, TrainState
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.log import StepLog
from mimo_train.training.saving import Saver
from mimo_train.training.setup import Session

__all__ = ["GlobalState", "SessionState", "TrainState", "session_of"]


@dataclass
class SessionState(GlobalState):
    """`GlobalState` of a run that `mimo_train.bridge.training.setup.setup` has set up."""

    session: Session = field(kw_only=True)
    callbacks: Callbacks = field(kw_only=True, default_factory=Callbacks)
    saver: Saver = field(init=False)
    log: StepLog = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.session = replace(self.session, state=self)
        self.saver, self.log = Saver(self.session, self.callbacks), StepLog(self.session, self.callbacks)

    @property
    def straggler_timer(self) -> Any:
        """The `StragglerTimer` of the log with `log.straggler`, else a context manager that measures nothing."""
        return self.log.stragglers or super().straggler_timer

    @classmethod
    def of(cls, session: Session, callbacks: Callbacks) -> "SessionState":
        """The state of a session; it shares progress, timers and loggers with the session's own."""
        own = session.state
        return cls(
            own.run,
            own.train_state,
            own.timers,
            own.start_time,
            own.metrics,
            own.console,
            own.data_ends,
            session=session,
            callbacks=callbacks,
        )


def session_of(state: GlobalState, function: str) -> Session:
    """The session of a state.

    Raises:
        TypeError: the run of this state has not been set up by `mimo_train.bridge.training.setup.setup`.
    """
    if not isinstance(state, SessionState):
        raise TypeError(
            f"{function}: expected the state that mimo_train.bridge.training.setup.setup returns, got "
            f"{type(state).__name__}. Call setup first; a run of pretrain does this work by itself"
        )
    return state.session
