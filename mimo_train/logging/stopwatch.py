"""Measure where the seconds of a step go on every device, and which modules the others wait for.

CPU intervals use the clock. GPU intervals are pairs of events on the current stream: they measure device time, exclude
host work that the device hides, and wait for the device only when times are read.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mimo_train.flight.recorder import RECORDER
from mimo_train.layout.ranks import RunLayout
from mimo_train.logging.console import Console

STEP = "step"
INTERVALS = (STEP, "forward_backward", "data_wait", "bridge_wait", "pipeline_wait", "reduce", "optimizer")
"""Names of intervals, in the order of a row of `time_split`.

step: the whole step, around all others. data_wait: the next batch. bridge_wait: in the bridge between modules, for the
transfer or the other side. pipeline_wait: the same between stages of one module. reduce: sums of gradients and of the
step's numbers over ranks. optimizer: update and gathering of weights.
"""


class Stopwatch:
    """Measure seconds per named interval: `with watch("optimizer"): ...`.

    Times are exclusive: an interval pauses the one around it, so that a step's intervals sum to the step. Intervals
    outside a step (an evaluation) are not counted, but the flight recorder records every interval. Not thread-safe.
    """

    def __init__(self, cuda: bool = False):
        """Measure with events of the current CUDA device if `cuda`, else with the clock."""
        self._cuda = cuda
        self._name = ""
        self._open: list[tuple[str, Any]] = []
        self._steps = 0
        self._seconds = dict.fromkeys(INTERVALS, 0.0)
        self._ended: list[tuple[str, str, Any, Any]] = []
        """(name, name of the surrounding interval or "", first event, last event), on CUDA."""
        self._events: list[Any] = []

    def __call__(self, name: str) -> "Stopwatch":
        """Name the interval that the `with` statement is about to open."""
        self._name = name
        return self

    def __enter__(self) -> None:
        name = self._name
        RECORDER.enter(name)
        counted = self._open[0][1] is not None if self._open else name == STEP
        self._open.append((name, self._now() if counted else None))

    def __exit__(self, *_error: object) -> None:
        RECORDER.leave()
        name, start = self._open.pop()
        if start is None:
            return
        around = self._open[-1][0] if self._open else ""
        if self._cuda:
            self._ended.append((name, around, start, self._now()))
        else:
            self._add(name, around, self._now() - start)
        self._steps += not around

    def read_and_reset(self) -> dict[str, float]:
        """Return seconds per step since the last reading, for each of `INTERVALS`. Call it between steps. On CUDA it
        waits until the device has finished the last step."""
        assert not self._open, f"interval {self._open[-1][0]} is open"
        if self._ended:
            self._ended[-1][3].synchronize()
        for name, around, start, end in self._ended:
            self._add(name, around, start.elapsed_time(end) / 1000)
            self._events += (start, end)
        self._ended = []
        mean = {name: seconds / max(1, self._steps) for name, seconds in self._seconds.items()}
        self._seconds, self._steps = dict.fromkeys(INTERVALS, 0.0), 0
        return mean

    def _add(self, name: str, around: str, seconds: float) -> None:
        self._seconds[name] += seconds
        if around:
            self._seconds[around] -= seconds

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        if self._events:
            event = self._events.pop()
        else:
            from mimo_train.parallel import device

            event = device.timing_event()
        event.record()
        return event


PARTS = ("compute", "bubble", "bridge_wait", "data_wait", "reduce", "optimizer")
"""Parts of a device's step, see `time_split`."""


def time_split(
    rows: Sequence[Sequence[float]], layout: RunLayout, work: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return seconds per step of every module, `time/<module>/<part>`: the mean over the module's devices.

    compute is forward and backward without the waits inside them. bubble is the wait between stages plus the rest of
    the step that belongs to no other part: the device is idle. A module's parts sum to the step. Modules that share a
    device split each part by `work`, an estimate, since their backward passes run as one; then the parts of all these
    modules sum to the step.

    Args:
        rows: per rank of the world, seconds of each of `INTERVALS`, from `Stopwatch.read_and_reset`.
        work: FLOPs of every module that shares devices; sets its share of a device.
    """
    split = {f"time/{name}/{part}": 0.0 for name in layout.modules for part in PARTS}
    for rank, row in enumerate(rows):
        times = dict(zip(INTERVALS, row, strict=True))
        times["compute"] = times.pop("forward_backward")
        times["bubble"] = times.pop("pipeline_wait") + times.pop(STEP)
        for name, share in _shares(layout.on_rank(rank), work).items():
            for part in PARTS:
                split[f"time/{name}/{part}"] += share * times[part] / layout.modules[name].size
    return split


def _shares(names: list[str], work: Mapping[str, float] | None) -> dict[str, float]:
    if len(names) <= 1:
        return dict.fromkeys(names, 1.0)
    assert work is not None, f"modules {names} share a device: work says how to divide it"
    total = sum(work[name] for name in names)
    return {name: work[name] / total if total else 1 / len(names) for name in names}


_BUSY = {"forward_backward": "computes", "optimizer": "optimizer", "data_wait": "waits for data"}
"""Intervals in which a rank does its own part of a step; in the others it waits for ranks or is idle."""


class Busiest:
    """Name the kind of rank (its modules and stages) with the least time to spare."""

    def __init__(self, layout: RunLayout):
        kinds = [layout.kind_of(rank) for rank in range(layout.world_size)]
        self._ranks = {kind: [rank for rank, its in enumerate(kinds) if its == kind] for kind in dict.fromkeys(kinds)}

    def name(self, rows: Sequence[Sequence[float]]) -> str:
        """Return the kind with the longest own part of a step, its share and its main interval; empty for a single
        kind.

        Args:
            rows: per rank of the world, seconds of each of `INTERVALS`, from `Stopwatch.read_and_reset`.
        """
        if len(self._ranks) == 1:
            return ""
        means = {kind: self._means([rows[rank] for rank in ranks]) for kind, ranks in self._ranks.items()}
        busy = {kind: sum(times[name] for name in _BUSY) for kind, times in means.items()}
        kind = max(busy, key=busy.__getitem__)
        total = sum(means[kind].values())
        if not total:
            return ""
        most = max(_BUSY, key=means[kind].__getitem__)
        return f"busiest: {kind} ({busy[kind] / total:.0%}, {_BUSY[most]})"

    @staticmethod
    def _means(rows: list[Sequence[float]]) -> dict[str, float]:
        return {name: sum(row[at] for row in rows) / len(rows) for at, name in enumerate(INTERVALS)}


class StragglerTimer(AbstractContextManager[Any]):
    """Turns compute times, collected on the logging rank, into values for the log and a line for the console.

    Compute time excludes waiting for other ranks. As a context manager it does nothing: it replaces Megatron-Core's
    `StragglerDetector` in ported code.
    """

    def __init__(self, layout: RunLayout, console: Console):
        """Take the run's console, which is silent on ranks that do not log; these observe no times."""
        self._layout, self._console, self._line = layout, console, ""

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
            {`straggler/<module>/slowest_rank`, `straggler/<module>/slowest_over_median`} of every module; the ratio is
            1 if all ranks are equally fast, NaN if none has computed.
        """
        values: dict[str, float] = {}
        parts = ["stragglers:"]
        for name, module in self._layout.modules.items():
            times = {rank: float(seconds[rank]) for rank in module.ranks}
            slowest, fastest = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
            median = statistics.median(times.values())
            ratio = times[slowest] / median if median > 0 else math.nan
            values |= {f"straggler/{name}/slowest_rank": slowest, f"straggler/{name}/slowest_over_median": ratio}
            parts.append(
                f"{name} rank {slowest} slowest ({times[slowest] / steps:.3g} s/step, {ratio:.2f} of the median), rank "
                f"{fastest} fastest ({times[fastest] / steps:.3g} s/step);"
            )
        total = sum(map(float, seconds.values()))
        if total > 0 and flops > 0:
            parts.append(f"{flops / total / 1e12:.3g} TFLOP/s per device while it computes")
        self._line = "  ".join(parts)
        return values

    def report(self) -> None:
        """Print the times last observed, once, and the rate at which the devices compute."""
        if self._line:
            self._console.message(self._line)
            self._line = ""
