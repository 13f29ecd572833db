"""When a run ends before its last step, on a signal or a time limit; all ranks agree on the step."""

import time
from dataclasses import dataclass

from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.optim.module_optimizer import ModuleOptimizer


class ExitVotes:
    """Reasons to exit that can reach ranks at different steps: a signal, and their clocks. Every rank votes in the
    step's `StepSum`, so that all ranks exit at the same step."""

    NUMBER = 2
    """Votes of a rank: it received a signal; its time limit has passed."""

    def __init__(self, exit_signal: ExitSignal, minutes: float, start_time: float):
        """
        Args:
            minutes: `train.exit_duration_minutes`.
            start_time: of the job, in seconds since the epoch. The clock may be set later without an effect.
        """
        self._signal = exit_signal
        began = time.monotonic() - (time.time() - start_time)
        self._deadline = began + 60 * minutes if minutes > 0 else float("inf")

    def own(self) -> tuple[bool, bool]:
        """This rank's votes, for the step's sum."""
        return self._signal.requested(), time.monotonic() >= self._deadline


@dataclass(frozen=True)
class AgreedVotes:
    """The votes of all ranks in the last step, the same on every rank."""

    signalled: bool = False
    out_of_time: bool = False


def agreed_votes(optimizer: ModuleOptimizer) -> AgreedVotes:
    """The votes of the last step, whose sums arrive on the host with the gradient norm; none before the first step."""
    return AgreedVotes(*(bool(votes) for votes in optimizer.arrived[: ExitVotes.NUMBER]))
