"""Numbers of a logging interval: accumulated on each rank, collected by one all-reduce and one copy to the host."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from data.order.step_plan import StepPlan
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.estimate.flops import Flops
from mimo_train.logging.runtime import report_memory
from mimo_train.logging.stopwatch import INTERVALS, Stopwatch
from mimo_train.parallel import device as devices
from mimo_train.training.step.bad_samples import StepCounts
from mimo_train.training.step.state import GlobalState

ADVANCED, SKIPPED, NAN = "advanced iterations", "skipped iterations", "nan iterations"
"""Counters: steps with an update, steps without, and of the latter those with a non-finite loss."""

EMPTY = "empty iterations of "
"""Prefix of counters on the device: updates in which no token had this loss, which the mean leaves out. Losses that are
not of tokens, such as router losses, have values in such steps."""


SUM, TOKENS = "sum of ", "tokens of "
"""Prefixes of the sums of sources, whose losses are divided once per interval."""

OTHER_NUMBERS = frozenset({ADVANCED, SKIPPED, NAN, "step", "consumed_samples", "exact_match", "samples"})
"""Names that no loss can have: those of other numbers in `metrics.jsonl` and of evaluations."""

OF_EVALUATIONS = ("eval/", "test/")
"""Prefixes of the numbers of an evaluation."""


def add_step(
    totals: dict[str, Any],
    losses: Mapping[str, torch.Tensor],
    skipped_iter: int,
    empty: torch.Tensor | None = None,
    of_sources: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Add a step to the sums of an interval; nothing leaves the device.

    Args:
        totals: sums by loss, and the three counters; starts empty, changed in place.
        losses: losses of the step, one number each; those of a skipped iteration are checked but not added.
        skipped_iter: 1 if the update was skipped.
        empty: 1 if no token of the step has a loss, 0-d.
        of_sources: see `StepResult.of_sources`.

    Raises:
        UserError: a loss has the name of another number of the log, or is not one number.
    """
    losses = {name: torch.as_tensor(loss) for name, loss in losses.items()}
    for name, loss in losses.items():
        if name in OTHER_NUMBERS or name.startswith((EMPTY, SUM, TOKENS, *OF_EVALUATIONS)):
            raise taken_name(name)
        if loss.numel() != 1:
            raise UserError(
                f"loss {name!r} must be one number, got a tensor of shape {tuple(loss.shape)}. Log its mean"
            )
        losses[name] = loss.reshape(())
    totals[ADVANCED] = totals.get(ADVANCED, 0) + 1 - skipped_iter
    totals[SKIPPED] = totals.get(SKIPPED, 0) + skipped_iter
    totals.setdefault(NAN, 0)
    if not skipped_iter:
        for name, value in losses.items():
            totals[name] = totals.get(name, 0.0) + value
            if empty is not None:
                totals[EMPTY + name] = totals.get(EMPTY + name, 0.0) + empty * (value == 0)
        for name, (value, tokens) in (of_sources or {}).items():
            totals[SUM + name] = totals.get(SUM + name, 0.0) + value
            totals[TOKENS + name] = totals.get(TOKENS + name, 0.0) + tokens
    elif losses:
        finite = torch.stack([value.isfinite().all() for value in losses.values()]).all()
        totals[NAN] = totals[NAN] + (~finite).double()


def taken_name(name: str) -> UserError:
    """Return the error of a loss with the name of another number of the log."""
    return UserError(
        f"the loss function returns a loss named {name!r}, under which the log keeps another number. Give it another "
        "name"
    )


def take_means(totals: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the mean of every loss over an interval's updates and the number of steps with a non-finite loss; resets
    all sums. A mean is NaN if no update had a token with that loss."""
    updates, nan_steps = max(totals.get(ADVANCED, 0), 1), totals.get(NAN, 0)
    counters = (ADVANCED, SKIPPED, NAN)
    means = {
        name: total / (updates - totals.get(EMPTY + name, 0))
        for name, total in totals.items()
        if name not in counters and not name.startswith((EMPTY, SUM, TOKENS))
    }
    # The token count tells a source without tokens from one whose loss is NaN.
    for name in [name.removeprefix(SUM) for name in totals if name.startswith(SUM)]:
        means[TOKENS + name] = totals[TOKENS + name]
        means[name] = totals[SUM + name] / totals[TOKENS + name].clamp(min=1)
    if isinstance(nan_steps, torch.Tensor):
        means[NAN] = nan_steps
    totals.clear()
    totals |= dict.fromkeys(counters, 0)
    return means


def sums_on_host(totals: dict[str, Any]) -> dict[str, list]:
    """Return the sums of `add_step` as plain values: (value, True if it was a tensor) by name."""
    return {
        name: [value.item() if isinstance(value, torch.Tensor) else value, isinstance(value, torch.Tensor)]
        for name, value in totals.items()
    }


def sums_on_device(plain: dict[str, list], device: torch.device) -> dict[str, Any]:
    """Return the sums that `sums_on_host` was called with."""
    return {
        name: torch.tensor(value, dtype=torch.float64, device=device) if is_tensor else value
        for name, (value, is_tensor) in plain.items()
    }


@dataclass(frozen=True)
class IntervalNumbers:
    """Numbers of all ranks since the last logging step."""

    steps: int
    tokens: int
    """Tokens of the steps over all ranks (`StepPlan.tokens`)."""
    positions: int
    """Positions of the rows that held the tokens, padding included."""
    samples: int
    seconds: float
    """Wall time of the steps on this rank."""
    flops: dict[str, Flops]
    """By module, over the interval."""
    times: list[list[float]]
    """[rank][`INTERVALS`], seconds per step."""
    memory: dict[str, float]
    """Largest over ranks, by the names of `report_memory`; empty unless `log.metrics` has `memory`."""
    losses: dict[str, float]
    """Means over the interval; empty on ranks without losses."""


class Interval:
    """Accumulates local numbers of `steps` steps; `collect` combines them over ranks and starts the next interval.

    `step_samples` and `step_tokens` are of the latest `log.throughput_window` steps of this job.
    """

    def __init__(
        self,
        state: GlobalState,
        stopwatch: Stopwatch,
        device: torch.device,
        counts: StepCounts,
    ):
        self._state, self._stopwatch, self._device = state, stopwatch, device
        self._counts = counts
        self._of_logits: torch.Tensor
        self._memory_names = list(report_memory(None)) if "memory" in state.cfg.log.metrics else []
        self.step_samples: deque[int] = deque(maxlen=max(state.cfg.log.throughput_window, 1))
        self.step_tokens: deque[int] = deque(maxlen=max(state.cfg.log.throughput_window, 1))
        self._reset()

    def note_step(
        self,
        flops: dict[str, Flops],
        plan: StepPlan,
        seconds: float,
        logits: torch.Tensor | None,
        of_logit: Flops,
    ) -> None:
        """Count a step.

        Args:
            flops: FLOPs of each module, without logits that `logits` counts.
            logits: positions that got logits, over all ranks, [1] on the device; each has `of_logit` FLOPs.
        """
        if logits is not None:
            each = devices.tensor([of_logit.model, of_logit.hardware], torch.float64, self._device)
            self._of_logits += logits * each
        self.steps += 1
        self._samples += plan.size
        self._tokens += plan.tokens
        self._positions += plan.positions
        self.step_samples.append(plan.size)
        self.step_tokens.append(plan.tokens)
        self._seconds += seconds
        for name, count in flops.items():
            self._flops[name] += count
        self._state.train_state.floating_point_operations_so_far += sum(count.model for count in flops.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and their counts, as plain values."""
        flops = {name: [count.model, count.hardware] for name, count in self._flops.items()}
        sums = {"samples": self._samples, "tokens": self._tokens, "positions": self._positions}
        of_logits = self._of_logits.tolist()
        return {"steps": self.steps, **sums, "seconds": self._seconds, "flops": flops, "of_logits": of_logits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of `state_dict`."""
        self.steps, self._samples, self._seconds = state["steps"], state["samples"], state["seconds"]
        of_whole_rows = self._samples * self._state.cfg.sample_length  # a checkpoint without token counts
        self._tokens, self._positions = (state.get(name, of_whole_rows) for name in ("tokens", "positions"))
        self._flops |= {name: Flops(*count) for name, count in state["flops"].items() if name in self._flops}
        self._of_logits = torch.tensor(state.get("of_logits", [0.0, 0.0]), dtype=torch.float64).to(self._device)

    def collect(self, losses: dict[str, torch.Tensor]) -> IntervalNumbers:
        """Return the numbers of all ranks, with `losses`, the means of the interval (0-d on the device). Collective:
        one sum over the world and one copy to the host."""
        seconds = self._stopwatch.read_and_reset()
        report = report_memory(None) if self._memory_names else {}
        local = [seconds[name] for name in INTERVALS] + [float(report.get(name, 0)) for name in self._memory_names]
        world, columns, names, rank = self._state.layout.world_size, len(local), sorted(losses), dist.get_rank()
        rows = [0.0] * (world * columns)
        rows[rank * columns : (rank + 1) * columns] = local
        sums = devices.tensor(rows, torch.float64, self._device)
        dist.all_reduce(sums)
        on_device = [losses[name].double().reshape(1) for name in names]
        host = torch.cat([sums, self._of_logits, self._counts.new, *on_device]).tolist()
        table = [host[rank * columns : (rank + 1) * columns] for rank in range(world)]
        model, hardware, bad, empty, *values = host[world * columns :]
        self._flops[LANGUAGE] += Flops(model, hardware)
        self._state.train_state.floating_point_operations_so_far += model
        values_by_name = dict(zip(names, values, strict=True))
        # A source without tokens has no loss.
        means = {name: value for name, value in values_by_name.items() if values_by_name.get(TOKENS + name, 1)}
        times = len(INTERVALS)
        numbers = IntervalNumbers(
            steps=self.steps,
            samples=self._samples,
            tokens=self._tokens,
            positions=self._positions,
            seconds=self._seconds,
            flops=self._flops,
            times=[row[:times] for row in table],
            memory={name: max(row[times + i] for row in table) for i, name in enumerate(self._memory_names)},
            losses={name: value for name, value in means.items() if not name.startswith(TOKENS)},
        )
        self._counts.settle((bad, empty))
        self._reset()
        return numbers

    def _reset(self) -> None:
        self.steps, self._samples, self._seconds = 0, 0, 0.0
        self._tokens = self._positions = 0
        self._flops: dict[str, Flops] = dict.fromkeys(self._state.layout.modules, Flops())
        self._of_logits = torch.zeros(2, dtype=torch.float64, device=self._device)
