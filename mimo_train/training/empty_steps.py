"""Steps in which no token has a loss: nothing was learned in them, whatever the log says."""

import torch

from data.text_format import plural
from mimo_train.config.errors import UserError
from mimo_train.parallel.metric_reduction import StepSum
from mimo_train.training.step.state import TrainState


class EmptySteps:
    """Counts on the device without waiting for it; `settle` moves the count to the host.

    Attributes:
        new: empty steps not yet in `TrainState.empty_steps`, 0-d float64 on the device; the same on every rank.
    """

    def __init__(self, train_state: TrainState, allowed: int, step_sum: StepSum, device: torch.device):
        """
        Args:
            allowed: `train.max_empty_steps`.
            step_sum: has the section `tokens`.
        """
        self._train_state, self._allowed, self._step_sum = train_state, allowed, step_sum
        self.new = torch.zeros((), dtype=torch.float64, device=device)

    def note(self) -> torch.Tensor:
        """Count the step whose sum was made last.

        Returns:
            1 if it is empty, else 0; 0-d float64 on the device.
        """
        tokens = self._step_sum.total("tokens")
        if tokens is None:  # a user's own loop, in which no step of ours was made
            return torch.zeros_like(self.new)
        empty = (tokens[0] == 0).double()
        self.new += empty
        return empty

    def settle(self, new: int | None = None) -> None:
        """Add the new ones to `TrainState.empty_steps`.

        Args:
            new: their number, if it is already on the host; otherwise this waits for the device.
        """
        self._train_state.empty_steps += int(self.new) if new is None else new
        self.new.zero_()

    def require_budget(self) -> None:
        """
        Raises:
            UserError: `TrainState.empty_steps` exceeds `train.max_empty_steps`; on every rank.
        """
        state = self._train_state
        if state.empty_steps <= self._allowed:
            return
        raise UserError(
            f"train.max_empty_steps: {state.empty_steps} of {plural(state.step, 'step')} had no token with loss, "
            f"{self._allowed} allowed; {plural(state.bad_samples, 'bad sample')} so far. Answers are empty, or cut by "
            "data.sequence_length (`mimo-train check` counts the tokens with loss), or every sample of a step is bad: "
            "mend the data, or raise train.max_empty_steps"
        )
