"""The bad samples of a run, counted over all ranks and all its starts, each once."""

import torch

from data.pipeline import Samples, require_budget
from mimo_train.evaluation.bad_sample_report import BadSampleReport
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.state import TrainState

_MOST_WAITING = 64
"""Steps whose flags are kept until the next count."""


class BadSampleCount:
    """Counts on the device without waiting for it; `settle` moves the count to the host.

    A sample is counted the first time: its row is kept in `TrainState.bad_rows`, so that neither another epoch nor a
    resume counts it again.

    Attributes:
        new: flags of bad samples not yet looked at, 0-d float64 on the device; the same on every rank.
    """

    def __init__(self, train_state: TrainState, dataset: Samples, report: BadSampleReport, device: torch.device):
        self._train_state, self._dataset, self._report = train_state, dataset, report
        self._rows = set(train_state.bad_rows)
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self.new = torch.zeros((), dtype=torch.float64, device=device)
        report.adopt(dataset.bad_samples, "train")

    def note(self, data: StepIterator) -> None:
        """Count the bad samples of the current step, found by any rank, after the step is done or left out. At times
        collective over all ranks, as `settle` is."""
        self.new += torch.count_nonzero(data.bad)
        self._waiting.append((data.current.first_sample, data.bad.clone()))
        if len(self._waiting) >= _MOST_WAITING:
            self.settle()

    def settle(self, new: int | None = None) -> None:
        """Add the new bad samples to `TrainState.bad_samples`, and tell of them. Collective over all ranks.

        Args:
            new: their number, if it is already on the host; otherwise this waits for the device.
        """
        found = int(self.new) if new is None else new
        waiting, self._waiting = self._waiting, []
        self.new.zero_()
        if not found:  # on every rank alike
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
        """
        Raises:
            TooManyBadSamples: `TrainState.bad_samples` exceeds `data.max_bad_samples`; on every rank.
        """
        allowed, latest = self._dataset.allowed_bad_samples, self._dataset.bad_samples.latest
        require_budget(self._train_state.bad_samples, allowed, latest)
