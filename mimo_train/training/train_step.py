"""One step of training: forward and backward over its microbatches, then the update."""

from dataclasses import replace

from mimo_train.training.setup import Session
from mimo_train.training.step.forward_backward import ForwardBackward
from mimo_train.training.step.forward_step import ForwardStepCallable
from mimo_train.training.step.state import StepResult


class TrainStep:
    """Makes the steps of a run.

    Attributes:
        forward_backward: runs the step's microbatches.
    """

    def __init__(self, session: Session, forward_step: ForwardStepCallable):
        """
        Args:
            forward_step: as the schedule calls it (see `prepare_forward_step_func`).
        """
        self._session = session
        pipeline = session.parts.pipeline
        self.forward_backward = ForwardBackward(forward_step, pipeline, session.optimizer, session.losses)

    def __call__(self) -> StepResult:
        """Make the current step of the data. Collective over all ranks."""
        session, data = self._session, self._session.data
        for _ in session.rerun.runs(data):
            self.forward_backward(data, len(data.current.microbatches))
        should_checkpoint, should_exit, exit_code = session.rerun.verdict()
        asked = StepResult(should_checkpoint=should_checkpoint, should_exit=should_exit, exit_code=exit_code)
        if should_exit:
            return replace(asked, skipped_iter=1)
        with session.parts.stopwatch("optimizer"):
            updated, grad_norm, num_zeros = session.optimizer.step()
        if updated:
            session.schedulers.step(increment=1)
        losses, router_losses = session.losses.reduced(), session.parts.pipeline.router_losses
        if losses:
            losses |= router_losses.reduced(session.parts.step_sum.total(router_losses.SECTION))
        return replace(
            asked,
            losses=losses,
            of_sources=session.losses.of_sources(),
            skipped_iter=int(not updated),
            grad_norm=grad_norm,
            num_zeros_in_grad=num_zeros,
        )
