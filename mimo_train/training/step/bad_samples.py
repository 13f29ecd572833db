"""Counts, limits and the report of samples that cannot be read, and of steps without a token with loss."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.samples.bad_samples import BadSample, BadSamples, require_budget
from data.samples.protocol import Samples
from data.text_format import plural, shown
from mimo_train.config.errors import UserError
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.state import TrainState

_logger = logging.getLogger(__name__)

FILE = "bad_samples.jsonl"
"""File in `run.dir`: one JSON object a line, with `shard`, `key`, `reason`, `part` (`train` or `held_out`), `number`
and `source` (empty without a mixture)."""

NAMED = 5
"""Most bad samples of one report that the console names."""


class BadSampleReport:
    """Reports the bad samples of all ranks."""

    def __init__(self, run_dir: Path, logging_rank: int, message: Callable[[str], None]):
        """Report on the console by `message`, which writes a line."""
        self._file, self._logging_rank, self._message = run_dir / FILE, logging_rank, message

    def adopt(self, bad_samples: BadSamples, part: str) -> None:
        """Report these as `part` (`train` or `held_out`) from now on, instead of each rank for itself."""
        bad_samples.is_quiet = True

        def append(new: list[BadSample]) -> None:
            _append(self._file, new, part)

        bad_samples.on_excess = append

    def __call__(self, bad_samples: BadSamples, part: str) -> None:
        """Report the samples that are new since the last call. Collective over all ranks."""
        new = bad_samples.take()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, new)
        if dist.get_rank() != self._logging_rank:
            return
        written = _append(self._file, [bad for of_rank in of_ranks for bad in of_rank], part)
        for bad in written[:NAMED]:
            self._message(f"bad sample: {bad}")
        if len(written) > NAMED:
            self._message(f"{len(written) - NAMED} more bad samples, see {self._file}")


def _append(path: Path, bad_samples: Iterable[BadSample], part: str) -> list[BadSample]:
    """Add the samples that are not yet in the file and return them, each once."""
    new: list[BadSample] = []
    try:
        listed = _listed(path)
        for bad in bad_samples:
            if (str(bad.shard), bad.key) not in listed:
                listed.add((str(bad.shard), bad.key))
                new.append(bad)
        entries = [
            {"shard": str(bad.shard), "key": bad.key, "reason": shown(bad.reason), "part": part}
            | {"number": bad.number, "source": bad.source}
            for bad in new
        ]
        if entries:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in entries))
    except OSError as error:  # a run does not end because of this file
        _logger.warning("%s cannot be written (%s): training continues without it", path, error)
    return new


def _listed(path: Path) -> set[tuple[str, str]]:
    listed: set[tuple[str, str]] = set()
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    listed.add((entry["shard"], entry["key"]))
                except (ValueError, KeyError, TypeError):
                    continue  # a line that was cut when a job was killed
    return listed


_MOST_WAITING = 64
"""Steps whose flags are kept until the next count."""


class StepCounts:
    """Counts bad samples and empty steps, on the device without waiting for it; `settle` moves counts to the host.

    A sample counts once: `TrainState.bad_rows` has its row, over epochs and resumes. An empty step has no token with
    loss. `new` has the numbers of bad samples and of empty steps that are not settled: [2], float64 on the device, the
    same on every rank.
    """

    def __init__(
        self,
        train_state: TrainState,
        dataset: Samples,
        report: BadSampleReport,
        max_empty_steps: int,
        device: torch.device,
    ):
        """`max_empty_steps` is `train.max_empty_steps`."""
        self._train_state, self._dataset, self._report = train_state, dataset, report
        self._rows, self._max_empty_steps = set(train_state.bad_rows), max_empty_steps
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self.new = torch.zeros(2, dtype=torch.float64, device=device)
        report.adopt(dataset.bad_samples, "train")

    def note(self, data: StepIterator, tokens: torch.Tensor | None) -> torch.Tensor:
        """Count the current step, after it is done or skipped. Collective at times, by `settle`.

        Args:
            tokens: tokens with loss over all ranks, 0-d on the device; None if the step was skipped.

        Returns:
            1 if the step is empty, else 0; 0-d float64 on the device.
        """
        empty = torch.zeros_like(self.new[1]) if tokens is None else (tokens == 0).double()
        self.new += torch.stack([torch.count_nonzero(data.bad).double(), empty])
        self._waiting.append((data.current.first_sample, data.bad.clone()))
        if len(self._waiting) >= _MOST_WAITING:
            self.settle()
        return empty

    def settle(self, new: Sequence[float] | None = None) -> None:
        """Add the `new` numbers to the train state, and report the bad samples. Collective over all ranks. Waits for
        the device if `new` is None."""
        bad_samples, empty_steps = self.new.tolist() if new is None else new
        waiting, self._waiting = self._waiting, []
        self.new.zero_()
        self._train_state.empty_steps += int(empty_steps)
        if not bad_samples:  # on every rank alike
            return
        for first, flags in waiting:
            for place in flags.nonzero().flatten().tolist():
                row = self._dataset.order.row(first + place)
                if row not in self._rows:
                    self._rows.add(row)
                    self._train_state.bad_rows.append(row)
                    self._train_state.bad_samples += 1
        self._report(self._dataset.bad_samples, "train")

    def require_budget(self) -> None:
        """Raise TooManyBadSamples or UserError on every rank if there are more bad samples than `data.max_bad_samples`
        or more empty steps than `train.max_empty_steps`."""
        state, dataset = self._train_state, self._dataset
        require_budget(state.bad_samples, dataset.allowed_bad_samples, dataset.bad_samples.latest)
        if state.empty_steps <= self._max_empty_steps:
            return
        raise UserError(
            f"train.max_empty_steps: {state.empty_steps} of {plural(state.step, 'step')} had no token with loss, "
            f"{self._max_empty_steps} allowed; {plural(state.bad_samples, 'bad sample')} so far. Answers are empty, or "
            "cut by data.sequence_length (`mimo-train check` counts the tokens with loss), or every sample of a step "
            "is bad: mend the data, or raise train.max_empty_steps"
        )
