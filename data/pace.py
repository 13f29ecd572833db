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


class Pace:
    """Takes turns for as long as reads are quick.

    Attributes:
        in_turn: whether the next step is read while the caller waits for it.
    """

    def __init__(self, *, takes_turns: bool) -> None:
        self.in_turn = takes_turns
        self._slow = 0

    def took(self, seconds: float, reads: int) -> None:
        """Note how long a step was waited for, with what is planned and put together beside its reads."""
        self._slow = self._slow + 1 if seconds > _QUICK * (reads + 1) else 0
        self.in_turn = self._slow < _SLOW_STEPS
