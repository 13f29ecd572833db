"""When a run ends before its last step: a signal or its time asks for it, and all ranks agree on the step."""

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mimo_train.step.state import GlobalState


class ExitSignal:
    """Notes SIGTERM (what schedulers send before they kill) and SIGUSR1; the loop asks between steps."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self):
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "ExitSignal":
        return self.listen()

    def listen(self) -> "ExitSignal":
        """Note signals from now on; again has no effect."""
        for number in self.SIGNALS if not self._previous else ():
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def requested(self) -> bool:
        """Whether this rank has received one of the signals."""
        return self._received is not None

    def _note(self, number: int, frame) -> None:
        self._received = number


class ExitConditions:
    """What this rank knows of reasons to end. Ranks see a signal, and their clocks, at different steps: the votes
    travel in the step's one sum over the world, and `Pipeline.agreed_votes` says whether any rank had one."""

    def __init__(self, state: "GlobalState", exit_signal: ExitSignal):
        self._signal = exit_signal
        minutes = state.cfg.train.exit_duration_minutes
        self._deadline = state.start_time + 60 * minutes if minutes > 0 else float("inf")

    def votes(self) -> tuple[bool, bool]:
        """(a signal was received, `train.exit_duration_minutes` have passed since the job's start), on this rank."""
        return self._signal.requested(), time.time() >= self._deadline
