"""The error budget: every bad sample is logged with shard and key, and too many of them end the run."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import NamedTuple

from data.errors import TooManyBadSamples

_log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """One bad sample: its global number, where it lies, and why it is bad."""

    number: int
    shard: Path
    key: str
    reason: str


class FaultLog:
    """Counts bad samples, each sample number once. Safe to use from several threads."""

    def __init__(self, max_bad_samples: int = 0) -> None:
        assert max_bad_samples >= 0, max_bad_samples
        self.max_bad_samples = max_bad_samples
        self._faults: dict[int, Fault] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return len(self._faults)

    def __contains__(self, number: int) -> bool:
        return number in self._faults

    def list(self) -> list[Fault]:
        """The faults so far, by sample number."""
        with self._lock:
            return sorted(self._faults.values())

    def record(self, fault: Fault) -> None:
        """Logs a fault that is new. Raises TooManyBadSamples when the budget is spent."""
        with self._lock:
            if fault.number in self._faults:
                return
            self._faults[fault.number] = fault
            count = len(self._faults)
        _log.warning("bad sample %d: %s, key %s: %s", fault.number, fault.shard, fault.key, fault.reason)
        if count > self.max_bad_samples:
            raise TooManyBadSamples(
                f"{fault.shard}, key {fault.key!r}: {fault.reason}. This is bad sample {count}, and "
                f"data.max_bad_samples={self.max_bad_samples} allows {self.max_bad_samples}. Repair the shard, or "
                "raise data.max_bad_samples (`mimo-train shards verify` lists all of them)."
            )
