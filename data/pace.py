"""Whether samples are read ahead of the caller, or while it waits for them.

What is read quickly is mostly Python's own work: beside a training step on the same processors, threads that do it take
the interpreter from the step, and lose it to the step, at every read. In turn with it the same work takes half of that
processor time. What takes longer is decoding, or a wait for a disk, in which the interpreter is free: it is done ahead.
"""

from __future__ import annotations

_QUICK = 0.0005
"""Seconds of one read, of a sample's text or of its media for one module."""
_SLOW_STEPS = 3
"""Steps in a row behind which reading ahead begins: at the first ones libraries are imported and files opened."""
_LOOKS_AGAIN = 64
"""Steps that are read ahead before one is read in turn again, to see: other work may have made the machine slow. Twice
as many from one time to the next."""


class Pace:
    """Takes turns while reads are quick.

    Attributes:
        in_turn: whether the next step is read while the caller waits for it.
    """

    def __init__(self, *, takes_turns: bool) -> None:
        self.in_turn = self._takes_turns = takes_turns
        self._slow, self._ahead, self._looks_again = 0, 0, _LOOKS_AGAIN

    def took(self, seconds: float, reads: int) -> None:
        """Note how long a step was waited for, with what is planned and put together beside its reads."""
        self._slow = self._slow + 1 if seconds > _QUICK * (reads + 1) else 0
        self.in_turn = self._slow < _SLOW_STEPS

    def was_ahead(self) -> None:
        """Note a step that was read ahead."""
        self._ahead += 1
        if self._takes_turns and self._ahead == self._looks_again:
            self.in_turn, self._slow = True, _SLOW_STEPS - 1
            self._ahead, self._looks_again = 0, 2 * self._looks_again
