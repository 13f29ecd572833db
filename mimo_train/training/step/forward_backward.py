"""Forward and backward over microbatches of the current step, from gradients of zero."""

from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.forward_step import ForwardStepCallable, record_losses
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.schedule import Pipeline


class ForwardBackward:
    """Runs microbatches of a `StepIterator` through the pipeline."""

    def __init__(
        self,
        forward_step: ForwardStepCallable,
        pipeline: Pipeline,
        optimizer: ModuleOptimizer,
        losses: StepLosses,
    ):
        """
        Args:
            forward_step: as the schedule calls it (see `prepare_forward_step_func`).
            losses: receives the losses of the microbatches.
        """
        self._forward_step = record_losses(forward_step, losses)
        self._pipeline, self._optimizer, self._losses = pipeline, optimizer, losses

    def __call__(self, data: StepIterator, num_microbatches: int) -> None:
        """Run the next `num_microbatches`; gradients are summed over ranks and divided by tokens afterwards, and the
        losses are those of these microbatches alone. Collective."""
        self._optimizer.zero_grad()
        for chunk in self._pipeline.model:
            chunk.zero_grad_buffer()
        self._losses.begin()
        with self._pipeline.stopwatch("forward_backward"):
            self._pipeline.run(self._forward_step, data, num_microbatches=num_microbatches)
