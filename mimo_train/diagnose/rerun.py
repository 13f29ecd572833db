"""Repeated steps: Megatron-Core's rerun state machine tells faults of the hardware from wrong numbers of the run.

With `train.rerun=validate_results` the loss of every microbatch is looked at. One that is not finite, or ten times the
largest seen, makes all ranks run the step again before the update:

- another loss, that was only too large: a transient fault; the step goes on with what the repetition gave;
- another loss, that was not finite: the run ends with exit code 17, and continues from its newest checkpoint;
- the same loss again, not finite: a checkpoint is saved, and the run ends with exit code 16; started again on another
  machine it repeats the step there, and says whether the device or the run is at fault.
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunState, RerunStateMachine

from mimo_train.parallel import device

SPIKE = 10.0
"""A loss this many times the largest of the first `SPIKE_SAMPLES` microbatches is suspect."""
SPIKE_SAMPLES = 100


class Rerun:
    """Runs the forward and backward passes of a step as often as the state machine wants. Costs nothing if disabled;
    else it reads every loss on the host, and ranks agree once or twice a step."""

    def __init__(self, mode: str, report_interval: int = 1):
        """
        Args:
            mode: `train.rerun`.
            report_interval: steps between two reports of `report_determinism_stats`.
        """
        self._machine = None
        if mode == RerunMode.DISABLED:
            return
        # The state machine itself leaves out the tracker of tensor-parallel generators, from which dropout draws.
        self._machine = RerunStateMachine(device.get_rng_state, device.set_rng_state, RerunMode(mode))
        RerunStateMachine.REPORTING_INTERVAL_ITERATIONS = report_interval
        _show_messages(logging.INFO if mode == RerunMode.REPORT_DETERMINISM_STATS else logging.WARNING)

    def runs(self, data_iterator: Any) -> Iterator[None]:
        """One turn for each time that the step has to be run. Collective, unless disabled."""
        if self._machine is None:
            yield
            return
        replay = _Replay(data_iterator)
        while self._machine.should_run_forward_backward(replay):
            yield

    def verdict(self) -> tuple[bool, bool, int]:
        """(whether to save a checkpoint, whether to end, exit code) after a step's runs."""
        return (False, False, 0) if self._machine is None else self._machine.should_checkpoint_and_exit()

    def validate(self, loss: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Look at the mean loss of a microbatch, if it is one of a step's runs.

        Args:
            loss: sum over the tokens, 0-d.
            num_tokens: 0-d.
        """
        machine = self._machine
        if machine is None or machine.state == RerunState.NOT_RUNNING_YET:
            return
        loss = loss.detach() / num_tokens.clamp(min=1)
        if machine.mode == RerunMode.REPORT_DETERMINISM_STATS:
            machine.validate_result(loss, torch.isnan, "loss")
            return
        machine.validate_result(loss, torch.isnan, "the loss is not a number", fatal=True)
        machine.validate_result(loss, torch.isinf, "the loss is infinite", fatal=True)
        large = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss", num_samples=SPIKE_SAMPLES)
        machine.validate_result(loss, large, "the loss is suddenly large", fatal=False)

    def state_dict(self, data_iterator: Any) -> dict[str, Any] | None:
        """What this rank must know to repeat the step after a restart; None if none is to be repeated."""
        if self._machine is None:
            return None
        state = self._machine.state_dict(_Replay(data_iterator), "torch_dist")
        if not self._machine.validate_state_dict(state):
            return None
        return {**state, "sharded": state["sharded"].data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Repeat the step that a checkpoint was saved for, if the mode is still the same."""
        if self._machine is not None and self._machine.mode == state["mode"]:
            self._machine.load_state_dict(state)


class _Replay(RerunDataIterator):
    """A `StepIterator` as the state machine wants it: the microbatches of a step can be had again, and where the data
    stands is the number of consumed samples."""

    def rewind(self) -> None:
        self.iterable.rewind()

    def advance(self) -> None:
        """The loop moves on."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The train state says where the data stands."""


def _show_messages(level: int) -> None:
    """Let the state machine speak on standard error, where the rest of Megatron-Core is silent."""
    logger = logging.getLogger(rerun_state_machine.__name__)
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False
