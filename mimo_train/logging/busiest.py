"""Which kind of rank the others wait for: a line of the console, from the times that a logging step has anyway. Imports
no torch."""

from collections.abc import Sequence

from mimo_train.layout.ranks import RunLayout
from mimo_train.logging.stopwatch import INTERVALS

_BUSY = {"forward_backward": "computes", "optimizer": "optimizer", "data_wait": "waits for data"}
"""Intervals in which a rank does its own part of a step; in the others it waits for ranks, or is idle."""


class Busiest:
    """Names the kind of rank, its modules and their stages, that has the least time to spare."""

    def __init__(self, layout: RunLayout):
        kinds = [layout.kind_of(rank) for rank in range(layout.world_size)]
        self._ranks = {kind: [rank for rank, its in enumerate(kinds) if its == kind] for kind in dict.fromkeys(kinds)}

    def name(self, rows: Sequence[Sequence[float]]) -> str:
        """The kind with the longest own part of a step, on average over its ranks, with its share of the step and what
        most of it is; empty where all ranks are of one kind.

        Args:
            rows: for each rank of the world, seconds of each of `INTERVALS`, as `Stopwatch.read_and_reset` gives them.
        """
        if len(self._ranks) == 1:
            return ""
        means = {kind: self._means([rows[rank] for rank in ranks]) for kind, ranks in self._ranks.items()}
        busy = {kind: sum(times[name] for name in _BUSY) for kind, times in means.items()}
        kind = max(busy, key=busy.__getitem__)
        whole = sum(means[kind].values())
        if not whole:
            return ""
        most = max(_BUSY, key=means[kind].__getitem__)
        return f"busiest: {kind} ({busy[kind] / whole:.0%}, {_BUSY[most]})"

    @staticmethod
    def _means(rows: list[Sequence[float]]) -> dict[str, float]:
        return {name: sum(row[at] for row in rows) / len(rows) for at, name in enumerate(INTERVALS)}
