"""When a run ends before its last step: a signal or its time asks for it, and all ranks agree on the step."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from mimo_train.optim.module_optimizer import ModuleOptimizer

Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` returns; None for a handler that was not set from Python, and cannot be set again."""


class ExitSignal:
    """Notes SIGTERM (what schedulers send before they kill) and SIGUSR1; the loop asks between steps."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> "ExitSignal":
        return self.listen()

    def listen(self) -> "ExitSignal":
        """Note signals from now on; again has no effect."""
        for number in self.SIGNALS if not self._previous else ():
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            if handler is not None:
                signal.signal(number, handler)
        self._previous.clear()

    def requested(self) -> bool:
        """Whether this rank has received one of the signals."""
        return self._received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number


class ExitVotes:
    """Reasons to end that ranks meet at different steps: a signal, and their clocks. Every rank votes in the step's one
    sum over the world, so that all end at the same step."""

    NUMBER = 2
    """Votes of a rank: it received a signal; its time is over."""

    def __init__(self, exit_signal: ExitSignal, minutes: float, start_time: float):
        """
        Args:
            minutes: `train.exit_duration_minutes`.
            start_time: of the job, in seconds since the epoch.
        """
        self._signal = exit_signal
        self._deadline = start_time + 60 * minutes if minutes > 0 else float("inf")

    def own(self) -> tuple[bool, bool]:
        """This rank's votes, for the step's sum."""
        return self._signal.requested(), time.time() >= self._deadline


@dataclass(frozen=True)
class AgreedVotes:
    """What ranks have voted in the last step, the same on every rank."""

    signalled: bool = False
    out_of_time: bool = False


def agreed_votes(optimizer: ModuleOptimizer) -> AgreedVotes:
    """The votes of the last step, whose sums over ranks come to the host with the gradient norm; none before the first
    step."""
    return AgreedVotes(*(bool(votes) for votes in optimizer.arrived))
