"""Waits for data that may be given up: a run that is asked to end does not sit out a stream that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

LOOK_SECONDS = 0.5
"""How long a wait lasts before it first asks whether it is given up, and about how long between two questions."""

GivesUp = Callable[[], bool]
"""Whether nobody needs any more what is waited for; once true, it stays so."""


class WaitGivenUp(Exception):
    """Samples were not waited for, because nobody needs them any more. Nothing is wrong with them."""


def never() -> bool:
    """A `GivesUp` that waits for as long as it takes."""
    return False


class Wait:
    """One wait, for one or several things; it begins when it is made."""

    def __init__(self, gives_up: GivesUp) -> None:
        self._gives_up, self._began = gives_up, time.monotonic()

    def look(self) -> None:
        """Raises WaitGivenUp if the wait has lasted for LOOK_SECONDS, and is given up."""
        if time.monotonic() > self._began + LOOK_SECONDS and self._gives_up():
            raise WaitGivenUp

    def result_of[Result](self, future: Future[Result]) -> Result:
        """What `future.result()` gives, or raises. Raises WaitGivenUp where there is none yet."""
        while not future.done():
            self.look()
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:  # of this wait; the work's own comes again below
                continue
        return future.result()
