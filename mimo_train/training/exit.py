"""When a run ends before its last step, on a signal or a time limit; all ranks agree on the step."""

import time
from dataclasses import dataclass

from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.step.same_samples import PARTS, parts_of, require_same


class StepsDiffer(RuntimeError):
    """Ranks are not at the same step."""


class ExitVotes:
    """Reasons to exit that can reach ranks at different steps: a signal, and their clocks. Every rank votes in the
    step's `StepSum`, so that all ranks exit at the same step."""

    NUMBER = 2
    """Votes of a rank: it received a signal; its time limit has passed."""
    SAME_STEP = 3
    """Numbers beside them by which ranks see that they sum the same step, see `numbers`."""
    ALL = NUMBER + SAME_STEP + PARTS

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

    def numbers(self, step: int, digest: int = 0) -> tuple[float, ...]:
        """What is summed over ranks: the votes, and 1, the step and its square, and `parts_of` the digest of the
        samples that this rank has read. Sums n, a and b of the step's three are those of one step only if n * b is
        a * a.
        """
        short = step % 1024  # so that sums of squares stay whole in float64
        return (*self.own(), 1, short, short * short, *parts_of(digest))


@dataclass(frozen=True)
class AgreedVotes:
    """The votes of all ranks in the last step, the same on every rank."""

    signalled: bool = False
    out_of_time: bool = False


def agreed_votes(optimizer: ModuleOptimizer) -> AgreedVotes:
    """The votes of the last step, whose sums arrive on the host with the gradient norm; none before the first step.

    Raises:
        StepsDiffer: ranks have summed different steps.
        SamplesDiffer: ranks have read different samples.
    """
    votes, others = optimizer.arrived[: ExitVotes.NUMBER], optimizer.arrived[ExitVotes.NUMBER :]
    same_step = others[: ExitVotes.SAME_STEP]
    if same_step and same_step[0] * same_step[2] != same_step[1] ** 2:
        raise StepsDiffer(
            f"{same_step[0]:.0f} ranks have summed different steps at the end of backward (their mean modulo 1024 "
            f"is {same_step[1] / same_step[0]:g}): a rank has left out a collective, or made one too many. Nothing of "
            "this step is saved; `mimo-train hang` with the run.dir says which rank"
        )
    if same_samples := others[ExitVotes.SAME_STEP : ExitVotes.SAME_STEP + PARTS]:
        require_same(same_samples)
    return AgreedVotes(*(bool(number) for number in votes))
