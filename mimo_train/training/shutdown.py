"""When a run ends: votes for a signal and a time limit, on which all ranks agree at the same step, and the reason."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mimo_train.evaluation.held_out import Ending
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.training.step.batches import StepIterator


class StepsDiffer(RuntimeError):
    """Ranks are not at the same step."""


class ExitVotes:
    """Reasons to exit that can reach ranks at different steps: a signal, and their clocks. Every rank votes in the
    step's `StepSum`, so that all ranks exit at the same step."""

    NUMBER = 2
    """Votes of a rank: it received a signal; its time limit has passed."""
    SAME_STEP = 3
    """Numbers beside them by which ranks see that they sum the same step, see `numbers`."""
    ALL = NUMBER + SAME_STEP

    def __init__(self, exit_signal: ExitSignal, minutes: float, start_time: float, *, ends_waits: bool = False):
        """
        Args:
            minutes: `train.exit_duration_minutes`.
            start_time: of the job, in seconds since the epoch. The clock may be set later without an effect.
            ends_waits: whether a vote ends waits for data: not where whoever makes the steps looks at no votes.
        """
        self._signal, self._ends_waits, self._told = exit_signal, ends_waits, False
        self._notice: EndNotice | None = None
        began = time.monotonic() - (time.time() - start_time)
        self._deadline = began + 60 * minutes if minutes > 0 else float("inf")

    def own(self) -> tuple[bool, bool]:
        """This rank's votes, for the step's sum. Once there is one, it stays."""
        return self._told or self._signal.requested(), time.monotonic() >= self._deadline

    def meet(self, meeting: Callable[[], dist.Store]) -> None:
        """From now on a signal to one rank ends waits for data on all of them.

        Args:
            meeting: gives the store by which ranks have met.
        """
        if self._ends_waits:
            self._notice = EndNotice(meeting())
            self._signal.tell_by(self._notice.give)

    @property
    def before_a_step(self) -> Callable[[], tuple[bool, bool]] | None:
        """Gives the votes where ranks have to agree before a step; None where no rank gives up a wait."""
        return self.own if self._ends_waits else None

    def gives_up(self) -> bool:
        """Whether this rank should wait no longer for data: it has a vote, or another rank was asked to end, in which
        case it votes too. The step that it has data for is the last one then, on all ranks."""
        if not self._ends_waits:
            return False
        if not any(self.own()) and self._notice is not None:
            self._told = self._notice.is_given()
        return any(self.own())

    @property
    def of_evaluations(self) -> Ending:
        """Ends an evaluation at its next batch."""
        return Ending(self.gives_up, self.own)

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return what is summed over ranks: the votes, and 1, the step and its square. Sums n, a and b of the last
        three come from one step only if n * b is a * a.
        """
        short = step % 1024  # so that sums of squares stay whole in float64
        return (*self.own(), 1, short, short * short)


@dataclass(frozen=True)
class AgreedVotes:
    """The votes of all ranks in the last step or evaluation, the same on every rank."""

    signalled: bool = False
    out_of_time: bool = False
    evaluation_left: bool = False
    """True if they ended the evaluation after the last step: the run is not finished."""


def agreed_votes(optimizer: ModuleOptimizer, data: StepIterator | None = None) -> AgreedVotes:
    """The votes of the last step, whose sums arrive on the host with the gradient norm; none before the first step.

    Args:
        data: those with which ranks have agreed to make no further step, if they have, are of this iterator.

    Raises:
        StepsDiffer: ranks have summed different steps.
    """
    if data is not None and data.ended_by is not None:
        return AgreedVotes(*data.ended_by)
    votes, same_step = optimizer.arrived[: ExitVotes.NUMBER], optimizer.arrived[ExitVotes.NUMBER : ExitVotes.ALL]
    if same_step and same_step[0] * same_step[2] != same_step[1] ** 2:
        raise StepsDiffer(
            f"{same_step[0]:.0f} ranks have summed different steps at the end of backward (their mean modulo 1024 "
            f"is {same_step[1] / same_step[0]:g}): a rank has left out a collective, or made one too many. Nothing of "
            "this step is saved; `mimo-train hang` with the run.dir says which rank"
        )
    return AgreedVotes(*(bool(number) for number in votes))


_KEY = "mimo_train/end_asked"
_PAUSE = 2.0
"""Seconds between two questions of a rank: each is a message to the one store of the run."""
_PATIENCE = 20.0
"""Seconds that an answer of the store is waited for. Its own time limit does not hold for all that it is asked."""


class EndNotice:
    """Kept in the store by which the ranks have met, over a connection of its own: that of the process groups may be
    waiting. It is opened when it is first needed; without a store that answers nobody is told."""

    def __init__(self, store: dist.Store):
        self._store: dist.Store | None = store
        self._own: dist.Store | None = None
        self._asked = -_PAUSE
        self._guard = threading.Lock()

    def give(self) -> None:
        """Tell the ranks that wait. From any thread."""
        with self._guard:
            self._reach(lambda store: store.set(_KEY, "1"))

    def is_given(self) -> bool:
        """Whether a rank has told; asks every other second."""
        with self._guard:
            now = time.monotonic()
            if now < self._asked + _PAUSE:
                return False
            self._asked = now
            return bool(self._reach(lambda store: store.check([_KEY])))

    def _reach[Answer](self, what: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None where it cannot be reached, and is not asked again."""
        if self._store is None:
            return None
        answer: Future[Answer] = Future()
        # In a thread, which is left behind where no answer comes.
        threading.Thread(target=self._ask, args=(self._store, what, answer), name="end notice", daemon=True).start()
        try:
            return answer.result(_PATIENCE)
        except (RuntimeError, TimeoutError):
            self._store = None
            return None

    def _ask[Answer](self, store: Any, what: Callable[[dist.Store], Answer], answer: Future[Answer]) -> None:
        try:
            if self._own is None:
                self._own = store.clone()  # torch's stubs lack it
            answer.set_result(what(self._own))
        except RuntimeError as error:
            answer.set_exception(error)
