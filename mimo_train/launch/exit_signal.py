"""Handle the signals that stop a run after its current step."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mimo_train.config.errors import UserError

Handler = Callable[[int, FrameType | None], object] | int | None
"""Result of `signal.signal`; None for a handler that was not set from Python and cannot be restored."""
REPEAT_SECONDS = 1.0
"""SIGINTs this close count as one: wrappers such as `timeout` forward a signal that the group already received."""


class ExitSignal:
    """Record the signals that ask a run to end; the training loop polls between steps.

    Schedulers send SIGTERM before they kill, Ctrl-C sends SIGINT, a closed terminal sends SIGHUP. A second SIGINT, more
    than REPEAT_SECONDS after the first signal, raises KeyboardInterrupt. SIGINT and SIGHUP stay ignored if they already
    are (`nohup`, background jobs).
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self._received_at: float | None = None
        self._previous: dict[int, Handler] = {}
        self._tell: Callable[[], object] | None = None
        self._wakeup: tuple[socket.socket, int] | None = None
        """Socket to which the interpreter writes signal numbers, and the file descriptor before."""

    def __enter__(self) -> "ExitSignal":
        return self.listen()

    def listen(self) -> "ExitSignal":
        """Start recording signals. Repeated calls and calls outside the main thread have no effect."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return self
        for number in self.SIGNALS:
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if not (ignored and number in (signal.SIGINT, signal.SIGHUP)):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            if handler is not None:
                signal.signal(number, handler)
        self._previous.clear()
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup[1])
            self._wakeup[0].close()
            self._wakeup = None

    def requested(self) -> bool:
        """True if this rank has received one of the signals."""
        return self._received_at is not None

    def tell_by(self, tell: Callable[[], object]) -> None:
        """Call `tell` from another thread as soon as a signal arrives, even while this thread waits in a collective.
        Only the last `tell` counts. Requires `listen` first."""
        self._tell = tell
        if self._previous and self._wakeup is None:
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            self._wakeup = writer, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._tell_of, args=(reader,), name="signals", daemon=True).start()
        if self.requested():
            tell()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received_at is None:
            self._received_at = time.monotonic()
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                with suppress(OSError):  # stderr may be in the middle of a write
                    os.write(2, b"SIGINT: the run finishes its step and saves. Press Ctrl-C again to end it now.\n")
        elif number == signal.SIGINT and not is_repeat(self._received_at):
            raise KeyboardInterrupt

    def _tell_of(self, reader: socket.socket) -> None:
        with reader, suppress(OSError):
            while numbers := reader.recv(64):
                if self._tell is not None and {*numbers} & {*self.SIGNALS}:
                    self._tell()


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at a SIGTERM inside the block, so that it cleans up as after a Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_repeat(received_at: float) -> bool:
    """True if a SIGINT that arrives now repeats the signal of `received_at` (monotonic seconds)."""
    return time.monotonic() - received_at <= REPEAT_SECONDS


def grace_seconds() -> float:
    """Return MIMO_GRACE_SECONDS, the seconds that ranks may take to save and exit (default 120). Raises UserError if it
    is not a positive number."""
    return seconds_of("MIMO_GRACE_SECONDS", 120.0)


def seconds_of(variable: str, default: float, *, or_none: bool = False) -> float:
    """Return the number of seconds in an environment variable. Raises UserError if it is not a positive number, or 0 if
    `or_none`."""
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or (seconds == 0 and not or_none):
        wanted = "a number of seconds, at least 0" if or_none else "a positive number of seconds"
        raise UserError(f"{variable} is {text!r}: give {wanted}")
    return seconds
