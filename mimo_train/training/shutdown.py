"""The end of a run, and its reason: a signal, a time limit, `train.exit_interval`, or the last step.

A signal and a clock reach ranks at different steps. So every rank votes in the one message of a step, and all end at
the same step. Ranks that wait for data see no message: a flag in the run's store tells them to end.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mimo_train.evaluation.held_out import Ending
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.logging import progress
from mimo_train.training.step.state import GlobalState

EXPLAINED = {
    "signal": "a signal requested an exit",
    "exit_duration_minutes": "train.exit_duration_minutes {train.exit_duration_minutes:g} have passed",
    "exit_interval": "train.exit_interval {train.exit_interval} is reached",
}
"""Console message for each reason to end before the last step."""

_STEPS = 1024
"""Step numbers are summed modulo this, so that sums of squares are exact in float64."""


class StepsDiffer(RuntimeError):
    """Ranks are not at the same step."""


@dataclass(frozen=True)
class AgreedVotes:
    """The votes of all ranks in the last step or evaluation, the same on every rank."""

    signalled: bool = False
    out_of_time: bool = False
    evaluation_left: bool = False
    """True if they ended the evaluation after the last step: the run is not finished."""


def exit_reason(state: GlobalState, votes: AgreedVotes) -> str | None:
    """Return why the run ends after this step: finished, signal, exit_duration_minutes or exit_interval; None if it
    continues. The same on every rank."""
    train, step = state.cfg.train, state.train_state.step
    if step >= state.last_step and not votes.evaluation_left:
        return progress.FINISHED
    if votes.signalled:
        return "signal"
    if votes.out_of_time:
        return "exit_duration_minutes"
    return "exit_interval" if is_due(train.exit_interval, step) else None


def is_due(interval: int, step: int) -> bool:
    """True after every `interval` steps; never if `interval` is 0."""
    return interval > 0 and step % interval == 0


class ExitVotes:
    """This rank's reasons to end the run, a signal and its clock.

    `agreed` has the votes of all ranks in the last step or evaluation; none before the first step.
    """

    NUMBERS = 5
    """Length of `numbers`."""

    def __init__(self, exit_signal: ExitSignal, minutes: float, start_time: float, *, ends_waits: bool = False):
        """Start without votes.

        Args:
            minutes: `train.exit_duration_minutes`.
            start_time: start of the job, in seconds since the epoch; later changes of the clock have no effect.
            ends_waits: a vote ends waits for data; False if the caller that makes the steps ignores votes.
        """
        self.agreed = AgreedVotes()
        self._signal, self._ends_waits, self._is_told = exit_signal, ends_waits, False
        self._flag: StopFlag | None = None
        began = time.monotonic() - (time.time() - start_time)
        self._deadline = began + 60 * minutes if minutes > 0 else float("inf")

    def local(self) -> tuple[bool, bool]:
        """Return this rank's votes, which never reset: (it received a signal, its time limit has passed)."""
        return self._is_told or self._signal.requested(), time.monotonic() >= self._deadline

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return the numbers to sum over ranks: the votes, 1, the step and its square. Sums n, a, b of the last three
        come from one step only if n * b == a * a."""
        short = step % _STEPS
        return (*self.local(), 1, short, short * short)

    def receive(self, sums: Sequence[float]) -> None:
        """Take the sums over ranks of `numbers`. Raises StepsDiffer if ranks summed different steps."""
        signalled, out_of_time, ranks, steps, squares = sums
        if ranks * squares != steps**2:
            raise StepsDiffer(
                f"{ranks:.0f} ranks have summed different steps at the end of backward (their mean modulo {_STEPS} is "
                f"{steps / ranks:g}): a rank skipped a collective or called one too many. Nothing of this step is "
                "saved. Run `mimo-train hang` with the run.dir to see which rank"
            )
        self.agreed = AgreedVotes(bool(signalled), bool(out_of_time))

    def meet(self, store: dist.Store) -> None:
        """Let a signal to one rank end waits on all ranks; `store` is that of the run's rendezvous."""
        if self._ends_waits:
            self._flag = StopFlag(store)
            self._signal.tell_by(self._flag.set)

    @property
    def before_a_step(self) -> Callable[[], tuple[bool, bool]] | None:
        """The votes to agree on before a step; None if no rank gives up a wait."""
        return self.local if self._ends_waits else None

    def gives_up(self) -> bool:
        """True if this rank should stop waiting for data: it has a vote, or another rank was asked to end and it votes
        too. The step it has data for is then the last one, on all ranks."""
        if not self._ends_waits:
            return False
        if not any(self.local()) and self._flag is not None:
            self._is_told = self._flag.is_set()
        return any(self.local())

    @property
    def of_evaluations(self) -> Ending:
        """Ends an evaluation at its next batch."""
        return Ending(self.gives_up, self.local)


_KEY = "mimo_train/end_asked"
_PAUSE = 2.0
"""Seconds between two requests of a rank; each is a message to the run's only store."""
_PATIENCE = 20.0
"""Seconds to wait for the store's answer, because its own time limit does not cover all requests."""


class StopFlag:
    """A flag in the rendezvous store, over its own connection, because that of the process groups may be waiting. The
    connection opens at the first use. If the store does not answer, no rank is notified."""

    def __init__(self, store: dist.Store):
        self._store: dist.Store | None = store
        self._connection: dist.Store | None = None
        self._requested_at = -_PAUSE
        self._guard = threading.Lock()

    def set(self) -> None:
        """Tell the waiting ranks; thread-safe."""
        with self._guard:
            self._request(lambda store: store.set(_KEY, "1"))

    def is_set(self) -> bool:
        """True if a rank has set the flag; asks the store every other second."""
        with self._guard:
            now = time.monotonic()
            if now < self._requested_at + _PAUSE:
                return False
            self._requested_at = now
            return bool(self._request(lambda store: store.check([_KEY])))

    def _request[Answer](self, request: Callable[[dist.Store], Answer]) -> Answer | None:
        """Return the store's answer; None if it cannot be reached, after which it is not asked again."""
        if self._store is None:
            return None
        answer: Future[Answer] = Future()
        # In a thread, which is abandoned if no answer comes.
        threading.Thread(target=self._send, args=(self._store, request, answer), name="stop flag", daemon=True).start()
        try:
            return answer.result(_PATIENCE)
        except (RuntimeError, TimeoutError):
            self._store = None
            return None

    def _send[Answer](self, store: Any, request: Callable[[dist.Store], Answer], answer: Future[Answer]) -> None:
        try:
            if self._connection is None:
                self._connection = store.clone()  # torch's stubs lack it
            answer.set_result(request(self._connection))
        except RuntimeError as error:
            answer.set_exception(error)
