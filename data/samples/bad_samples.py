"""Bad samples (those that cannot be read): each is logged once, and more than `data.max_bad_samples` end the run.

A run counts over all ranks and restarts, and its held-out samples separately. A process's count never exceeds the
run's, so either may end the run.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

from data.errors import TooManyBadSamples
from data.storage.url import Place
from data.text_format import shown

_log = logging.getLogger(__name__)


class BadSample(NamedTuple):
    """A sample that cannot be read: global number, shard, key, reason, and source in a mixture."""

    number: int
    shard: Place
    key: str
    reason: str
    source: str = ""

    def __str__(self) -> str:
        source = f" of {self.source}" if self.source else ""
        return f"{self.shard}{source}, key {self.key!r}: {shown(self.reason)}"


def require_budget(count: int, allowed: int, example: BadSample | None = None) -> None:
    """Raise TooManyBadSamples if `count` exceeds `allowed` (`data.max_bad_samples`). The message names `example`."""
    if count <= allowed:
        return
    raise TooManyBadSamples(
        f"data.max_bad_samples: {count} bad {'sample' if count == 1 else 'samples'}, {allowed} allowed"
        f"{'' if example is None else f', for example {example}'}. Repair the shards (`mimo-train shards verify` lists "
        "every bad sample), or raise data.max_bad_samples"
    )


def allowed_of(limit: float, samples: int) -> int:
    """Return how many of `samples` may be bad: `data.max_bad_samples` is a number or, below 1, a fraction."""
    return math.floor(limit * samples) if 0 < limit < 1 else int(limit)


class BadSamples:
    """The bad samples that this process has found, each once by `row_of` (number -> row). Thread-safe.

    Attributes:
        is_quiet: True if the caller reports them (`take`); else each is logged.
        on_excess: called with untaken samples before too many end the run.
    """

    def __init__(self, allowed: int, row_of: Callable[[int], int] = lambda number: number) -> None:
        assert allowed >= 0, allowed
        self.is_quiet = False
        self.on_excess: Callable[[list[BadSample]], None] = lambda new: None
        self._allowed, self._row_of = allowed, row_of
        self._found: dict[int, BadSample] = {}
        self._new: list[BadSample] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return len(self._found)

    def __contains__(self, number: int) -> bool:
        return self._row_of(number) in self._found

    @property
    def latest(self) -> BadSample | None:
        """The one found last; None if there is none."""
        with self._lock:
            return next(reversed(self._found.values()), None)

    def take(self) -> list[BadSample]:
        """Return those found since the last call."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def record(self, bad: BadSample) -> None:
        """Count a new one of any epoch. Raises TooManyBadSamples."""
        row = self._row_of(bad.number)
        with self._lock:
            if row in self._found:
                return
            self._found[row] = bad
            self._new.append(bad)
            count = len(self._found)
        if not self.is_quiet:
            _log.warning("bad sample: %s", bad)
        if count > self._allowed:
            self.on_excess(self.take())
        require_budget(count, self._allowed, bad)
