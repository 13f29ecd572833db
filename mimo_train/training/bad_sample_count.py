"""The bad samples of a run, counted over all ranks and all its starts."""

import torch

from data.pipeline import BadSample, require_budget
from mimo_train.step.batches import StepIterator
from mimo_train.step.state import TrainState


class BadSampleCount:
    """Counts on the device without waiting for it; `settle` moves the count to the host.

    Attributes:
        new: bad samples not yet in `TrainState.bad_samples`, 0-d float64 on the device; the same on every rank.
    """

    def __init__(self, train_state: TrainState, allowed: int, device: torch.device):
        """`allowed`: `data.max_bad_samples`."""
        self._train_state, self._allowed = train_state, allowed
        self._example: BadSample | None = None
        self.new = torch.zeros((), dtype=torch.float64, device=device)

    def note(self, data: StepIterator) -> None:
        """Count the bad samples of the current step, found by any rank, after the step is done or left out."""
        self.new += torch.count_nonzero(data.bad)
        self._example = data.dataset.bad_samples.latest

    def settle(self, new: int | None = None) -> None:
        """Add the new bad samples to `TrainState.bad_samples`.

        Args:
            new: their number, if it is already on the host; otherwise this waits for the device.
        """
        self._train_state.bad_samples += int(self.new) if new is None else new
        self.new.zero_()

    def require_budget(self) -> None:
        """
        Raises:
            TooManyBadSamples: `TrainState.bad_samples` exceeds `data.max_bad_samples`; on every rank.
        """
        require_budget(self._train_state.bad_samples, self._allowed, self._example)
