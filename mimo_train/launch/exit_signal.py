"""The signals that ask a run to end. Imports no torch, so that a process can listen before its slow imports."""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` returns; None for a handler that was not set from Python, and cannot be set again."""


class ExitSignal:
    """Records SIGTERM (which schedulers send before they kill) and SIGUSR1; the loop checks between steps."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> "ExitSignal":
        return self.listen()

    def listen(self) -> "ExitSignal":
        """Record signals from now on; a second call has no effect."""
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
