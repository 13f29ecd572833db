"""Bad samples (samples that cannot be read): each is logged with shard and key, and more than `data.max_bad_samples`
end the run.

There is one rule, `require_budget`, and two that count for it. A dataset counts the samples that its own process has
read. A run of several ranks counts over all ranks and all its starts, each sample of a step once, whoever read it; an
evaluation counts the held-out samples in the same way, apart from those. The count of a rank is never above that of the
run, so it is right whichever is the first to end the run.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import NamedTuple

from data.errors import TooManyBadSamples
from data.shown import shown

_log = logging.getLogger(__name__)


class BadSample(NamedTuple):
    """A sample that cannot be read: its global number, where it is, and why."""

    number: int
    shard: Path
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}, key {self.key!r}: {shown(self.reason)}"


def require_budget(count: int, allowed: int, example: BadSample | None = None) -> None:
    """Ends the run if more samples are bad than `data.max_bad_samples` allows.

    Args:
        count: bad samples so far.
        allowed: `data.max_bad_samples`.
        example: one of them, where this process knows one.

    Raises:
        TooManyBadSamples: `count` is above `allowed`.
    """
    if count <= allowed:
        return
    raise TooManyBadSamples(
        f"data.max_bad_samples: {count} bad {'sample' if count == 1 else 'samples'}, {allowed} allowed"
        f"{'' if example is None else f', for example {example}'}. Repair the shards (`mimo-train shards verify` lists "
        "every bad sample), or raise data.max_bad_samples"
    )


class BadSamples:
    """The bad samples that this process has found, each number once. Safe to use from several threads."""

    def __init__(self, allowed: int) -> None:
        assert allowed >= 0, allowed
        self._allowed = allowed
        self._found: dict[int, BadSample] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many were found so far."""
        return len(self._found)

    def __contains__(self, number: int) -> bool:
        return number in self._found

    @property
    def latest(self) -> BadSample | None:
        """The one found last; None if there is none."""
        with self._lock:
            return next(reversed(self._found.values()), None)

    def record(self, bad: BadSample) -> None:
        """Logs and counts one that is new. Raises TooManyBadSamples as `require_budget` does."""
        with self._lock:
            if bad.number in self._found:
                return
            self._found[bad.number] = bad
            count = len(self._found)
        _log.warning("bad sample %d: %s", bad.number, bad)
        require_budget(count, self._allowed, bad)
