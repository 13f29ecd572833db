"""Numbers of a logging interval: gathered where they arise, brought to the host by one message and one copy."""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from data.pipeline import BadSample
from mimo_train.diagnose.straggler import StragglerTimer
from mimo_train.metrics.memory_stats import report_memory
from mimo_train.metrics.stopwatch import INTERVALS
from mimo_train.plan.flops import Flops
from mimo_train.step.batches import StepIterator
from mimo_train.step.state import GlobalState


@dataclass(frozen=True)
class IntervalNumbers:
    """What all ranks did since the last logging step."""

    steps: int
    samples: int
    seconds: float
    """Wall time of the steps on this rank."""
    flops: dict[str, Flops]
    """By module, over the interval."""
    times: list[list[float]]
    """[rank][`INTERVALS`], seconds per step."""
    memory: dict[str, float]
    """Largest over ranks, by the names of `report_memory`; empty unless `log.memory`."""
    bad_samples: int
    """Samples that could not be read."""
    losses: dict[str, float]
    """Means over the interval; empty on ranks without losses."""


class Interval:
    """Gathers during the interval what costs no message; `collect` does the rest, and starts the next one.

    Attributes:
        model_flops: of all modules, so far.
        stragglers: takes the compute times of the ranks, or None.
        bad_sample: the one that this rank found last, if any.
        step_samples: samples of the latest steps of this job, as many as `log.throughput_window` looks at.
    """

    def __init__(self, state: GlobalState, stragglers: StragglerTimer | None = None):
        self._state, self.stragglers = state, stragglers
        self._memory_names = list(report_memory(None)) if state.cfg.log.memory else []
        self._bad = torch.zeros((), dtype=torch.float64, device=state.device)
        self.bad_sample: BadSample | None = None
        self.step_samples: deque[int] = deque(maxlen=max(state.cfg.log.throughput_window, 1))
        self._reset()

    def _reset(self) -> None:
        self._steps, self._samples, self._seconds = 0, 0, 0.0
        self._flops: dict[str, Flops] = dict.fromkeys(self._state.layout.modules, Flops())
        self._bad.zero_()
        self.model_flops = 0.0

    def note_step(self, flops: dict[str, Flops], samples: int, seconds: float) -> None:
        """Count a step.

        Args:
            flops: of each module.
            seconds: wall time on this rank.
        """
        self._steps += 1
        self._samples += samples
        self.step_samples.append(samples)
        self._seconds += seconds
        for name, count in flops.items():
            self._flops[name] += count
        model_flops = sum(count.model for count in flops.values())
        self.model_flops += model_flops
        self._state.train_state.floating_point_operations_so_far += model_flops

    def note_bad_samples(self, iterator: StepIterator) -> None:
        """Count the bad samples of a step, found by any rank, on the device; also of a step that was passed over."""
        self._bad += torch.count_nonzero(iterator.bad)
        self.bad_sample = iterator.dataset.bad_samples.latest

    def take_bad_samples(self) -> int:
        """How many there were since they were last taken, over all ranks. Waits for the device."""
        found = int(self._bad)
        self._bad.zero_()
        return found

    def collect(self, losses: dict[str, torch.Tensor]) -> IntervalNumbers:
        """The numbers of all ranks. Collective: one sum over the world and one copy to the host.

        Args:
            losses: mean of every loss over the interval, 0-d on the device.
        """
        state = self._state
        seconds = state.stopwatch.read_and_reset()
        report = report_memory(None) if self._memory_names else {}
        own = [seconds[name] for name in INTERVALS] + [float(report.get(name, 0)) for name in self._memory_names]
        world, columns, names = state.layout.world_size, len(own), sorted(losses)
        rank = dist.get_rank()
        before, after = [0.0] * (rank * columns), [0.0] * ((world - 1 - rank) * columns)
        rows = torch.tensor(before + own + after, dtype=torch.float64).to(state.device)
        if world > 1:
            dist.all_reduce(rows)
        host = torch.cat([rows, torch.stack([self._bad, *(losses[name].double() for name in names)])]).tolist()
        table = [host[rank * columns : (rank + 1) * columns] for rank in range(world)]
        bad, *means = host[world * columns :]
        times = len(INTERVALS)
        numbers = IntervalNumbers(
            steps=self._steps,
            samples=self._samples,
            seconds=self._seconds,
            flops=self._flops,
            times=[row[:times] for row in table],
            memory={name: max(row[times + i] for row in table) for i, name in enumerate(self._memory_names)},
            bad_samples=int(bad),
            losses=dict(zip(names, means, strict=True)),
        )
        self._reset()
        return numbers
