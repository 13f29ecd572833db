"""When the loop evaluates, and where the values are written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mimo_train.evaluation.held_out import EvaluationGivenUp
from mimo_train.flight.recorder import RECORDER
from mimo_train.metrics import progress
from mimo_train.step.forward_step import ForwardStepCallable
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.setup import Session


@dataclass(frozen=True)
class EvaluationHooks:
    """User functions for evaluations."""

    process: Callable[[Any, int, Any], None] | None = None
    """Called as (data, step, writer) on the logging rank, with TensorBoard's `SummaryWriter`, or None where
    `log.tensorboard` is off."""
    give: Callable[[list], Any] | None = None
    """Called as (model) on every rank; returns the data. Without it, the data is the list of what the loss functions
    return with non_loss_data=True for the microbatches of the first held-out step."""


def evaluate_when_due(
    session: Session, step_func: ForwardStepCallable, callbacks: Callbacks, hooks: EvaluationHooks | None = None
) -> None:
    """Evaluate every `train.eval_interval` steps and after the last one. Collective over all ranks.

    Args:
        step_func: the run's forward step, as the schedule calls it.
    """
    state, held_out = session.state, session.held_out
    interval, step = state.cfg.train.eval_interval, state.train_state.step
    due = (interval > 0 and step % interval == 0) or step == state.last_step
    if held_out is None or not due:
        return
    try:
        with RECORDER.during("evaluate"):
            values = {name: value for one in session.held_out_sets for name, value in one.evaluate(step).items()}
    except EvaluationGivenUp:
        state.console.message(
            f"the evaluation at step {step} was given up: the run is to end, and held-out samples have not come"
        )
        return
    if state.is_logging_rank:
        state.metrics.log(step, state.train_state.consumed_train_samples, values)
        state.console.evaluation(step, values)
        for name in [name for name, value in values.items() if name.endswith("/samples") and value == 0]:
            of_set = name.removeprefix("eval/").rpartition("/")[0]
            said = f"evaluation of {of_set}" if of_set else "evaluation"
            state.console.message(
                f"{said}: no held-out sample has a token with loss: answers are empty, or cut by "
                "data.sequence_length, or the samples are bad"
            )
        progress.evaluated(state.run_dir, step=step, values=values)
    if hooks is not None:
        data = held_out.non_loss_data(step_func, hooks.give)
        if hooks.process is not None and state.is_logging_rank:
            hooks.process(data, step, state.tensorboard_logger)
    callbacks.fire("on_evaluation", state, values)
