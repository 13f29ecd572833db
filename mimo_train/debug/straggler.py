"""Names the slowest and the fastest rank of every module, from the compute times of a logging interval."""

import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mimo_train.layout.ranks import RunLayout
from mimo_train.logging.console import Console


@dataclass(frozen=True)
class Spread:
    """The compute times of one module's ranks over a logging interval, in seconds."""

    slowest_rank: int
    slowest: float
    fastest_rank: int
    fastest: float
    median: float

    @property
    def slowest_over_median(self) -> float:
        """Slowest over median: 1 if all ranks are equally fast, NaN if none has computed."""
        return self.slowest / self.median if self.median > 0 else float("nan")


class StragglerTimer(AbstractContextManager[Any]):
    """Turns compute times, collected on the logging rank, into values for the log and a line for the console.

    Compute time excludes waiting for other ranks. As a context manager it does nothing: it replaces Megatron-Core's
    `StragglerDetector` in ported code.
    """

    def __init__(self, layout: RunLayout, console: Console):
        """Take the run's console, which is silent on ranks that do not log; these observe no times."""
        self._layout, self._console = layout, console
        self._spreads: dict[str, Spread] = {}
        self._seconds, self._flops, self._steps = 0.0, 0.0, 1

    def __call__(self, bdata: bool = False) -> "StragglerTimer":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def observe(self, seconds: Mapping[int, float], steps: int, flops: float = 0.0) -> dict[str, float]:
        """Take the compute times of a logging interval.

        Args:
            seconds: {rank: seconds of forward and backward computation in the interval}, all ranks of the run.
            steps: steps of the interval.
            flops: FLOPs of all ranks over the interval.

        Returns:
            {`straggler/<module>/slowest_rank`, `straggler/<module>/slowest_over_median`} of every module.
        """
        self._seconds, self._flops, self._steps = sum(map(float, seconds.values())), flops, steps
        self._spreads = {
            name: _spread({rank: float(seconds[rank]) for rank in module.ranks})
            for name, module in self._layout.modules.items()
        }
        values: dict[str, float] = {}
        for name, spread in self._spreads.items():
            values[f"straggler/{name}/slowest_rank"] = spread.slowest_rank
            values[f"straggler/{name}/slowest_over_median"] = spread.slowest_over_median
        return values

    def report(self) -> None:
        """Print the times last observed, once, and the rate at which the devices compute."""
        if not self._spreads:
            return
        parts = [f"{name} {_described(spread, self._steps)}" for name, spread in self._spreads.items()]
        if self._seconds > 0 and self._flops > 0:
            parts.append(f"{self._flops / self._seconds / 1e12:.3g} TFLOP/s per device while it computes")
        self._console.message("  ".join(["stragglers:", *parts]))
        self._spreads = {}


def _spread(seconds: Mapping[int, float]) -> Spread:
    slowest, fastest = max(seconds, key=seconds.__getitem__), min(seconds, key=seconds.__getitem__)
    return Spread(slowest, seconds[slowest], fastest, seconds[fastest], statistics.median(seconds.values()))


def _described(spread: Spread, steps: int) -> str:
    return (
        f"rank {spread.slowest_rank} slowest ({spread.slowest / steps:.3g} s/step, {spread.slowest_over_median:.2f} of "
        f"the median), rank {spread.fastest_rank} fastest ({spread.fastest / steps:.3g} s/step);"
    )
