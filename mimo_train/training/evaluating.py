"""Schedule of evaluations, and the output of their values."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.evaluation.held_out import EvaluationStopped, HeldOut
from mimo_train.flight.recorder import RECORDER
from mimo_train.logging import progress
from mimo_train.logging.console import CountBar
from mimo_train.training.callbacks import Callback, Callbacks
from mimo_train.training.saving import Saver
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import AgreedVotes, is_due
from mimo_train.training.step.forward_step import ForwardStepCallable
from mimo_train.training.step.state import GlobalState, StepResult


@dataclass(frozen=True)
class EvaluationHooks:
    """User functions for evaluations."""

    process: Callable[[Any, int, Any], None] | None = None
    """Called as (data, step, writer) on the logging rank; `writer` is TensorBoard's `SummaryWriter` or None."""
    give: Callable[[list], Any] | None = None
    """Called as (model) on every rank; returns the data. Without it, the data is the list of the loss functions'
    results with non_loss_data=True for the microbatches of the first held-out step."""


class Evaluator(Callback):
    """Evaluates every `train.eval_interval` steps and after the last one, which includes the test set.

    Votes that end an evaluation become those of the session, and the run is saved.
    """

    def __init__(
        self,
        session: Session,
        step_func: ForwardStepCallable,
        callbacks: Callbacks,
        saver: Saver,
        hooks: EvaluationHooks | None = None,
    ):
        """`step_func` is the run's forward step, as the schedule calls it."""
        self._session, self._step_func, self._callbacks, self._hooks = session, step_func, callbacks, hooks
        self._saver, self._told_no_text = saver, False

    def on_train_start(self, state: GlobalState, model: list) -> None:
        """Evaluate the step that the run resumes from, unless an earlier job did on these sets. Collective."""
        sets = self._due()
        if not state.train_state.step or not sets:
            return
        is_done = torch.tensor(
            int(state.is_logging_rank and self._is_done(sets)), device=self._session.parts.pipeline.device
        )
        dist.all_reduce(is_done)
        if not int(is_done):
            self.on_step_end(state)

    def on_step_end(self, state: GlobalState, result: StepResult | None = None) -> None:
        """Evaluate if due; the next job does it if a rank was asked to end the run. Collective."""
        votes = self._session.votes
        before, votes.agreed = votes.agreed, self._evaluate(votes.agreed)
        if votes.agreed != before:
            self._saver.on_step_end(state, result or StepResult())

    def _evaluate(self, votes: AgreedVotes) -> AgreedVotes:
        """Return the votes, including those that ended the evaluation."""
        state, sets = self._session.state, self._due()
        step = state.train_state.step
        if not sets:
            return votes
        is_last = step == state.last_step
        if votes.signalled or votes.out_of_time:
            return AgreedVotes(votes.signalled, votes.out_of_time, evaluation_left=is_last)
        bar = CountBar(
            f"evaluation at step {step}", sum(each.samples for each in sets), "samples", write=state.console.message
        )
        try:
            with RECORDER.during("evaluate"):
                values: dict[str, float] = {}
                for each in sets:
                    values |= each.evaluate(step, self._step_func, bar.add)
        except EvaluationStopped as stopped:
            state.console.message(
                f"evaluation at step {step} stopped after {bar.done:,} samples: the run is to end. It is repeated when "
                "the run resumes"
            )
            return AgreedVotes(*stopped.votes, evaluation_left=is_last)
        finally:
            bar.close()
        self._write(values, sets)
        hooks = self._hooks
        if hooks is not None and not sets[0].is_test:
            data = sets[0].non_loss_data(self._step_func, hooks.give)
            if hooks.process is not None and state.is_logging_rank:
                hooks.process(data, step, state.tensorboard_logger)
        self._callbacks.fire("on_evaluation", state, values)
        return votes

    def _due(self) -> list[HeldOut]:
        state, sets = self._session.state, self._session.held_out_sets
        step = state.train_state.step
        if step == state.last_step:
            return list(sets)
        evaluates = is_due(state.cfg.train.eval_interval, step)
        return [each for each in sets if evaluates and not each.is_test]

    def _is_done(self, sets: list[HeldOut]) -> bool:
        state, is_done = self._session.state, False
        step = str(state.train_state.step)
        with suppress(OSError):
            for _, kind, facts in progress.events(state.run_dir):
                if kind == progress.START and facts.get("step", step).isdigit() and int(facts["step"]) < int(step):
                    is_done = False  # a later job trained this step again
                if kind == progress.EVALUATION and facts.get("step") == step:
                    is_done = facts.get("sets") == self._digest(sets)
        return is_done

    def _write(self, values: dict[str, float], sets: list[HeldOut]) -> None:
        state, step = self._session.state, self._session.state.train_state.step
        if not state.is_logging_rank:
            return
        state.metrics.log(step, state.train_state.consumed_train_samples, values)
        state.console.evaluation(step, values)
        for each in sets:
            if values[f"{each.prefix}samples"] == 0:
                name = each.prefix.removeprefix("eval/").rstrip("/")
                state.console.message(
                    f"evaluation{name and f' of {name}'}: no held-out sample has a token with loss. Answers are empty, "
                    "cut by data.sequence_length, or the samples are bad"
                )
        if not self._told_no_text and f"{sets[0].prefix}exact_match" not in values:
            self._told_no_text = True
            state.console.message(
                "exact match is skipped: the model ends in a head of its own, and no logits of the vocabulary"
            )
        means = {key: f"{value:.6g}" for key, value in values.items()}
        progress.append(state.run_dir, progress.EVALUATION, step=step, sets=self._digest(sets), **means)

    def _digest(self, sets: list[HeldOut]) -> str:
        """Return a fingerprint of what an evaluation measures: its sets, forward step and loss weights."""
        step = getattr(self._step_func, "func", self._step_func)
        step = step if hasattr(step, "__qualname__") else type(step)
        of_step = (step.__module__, step.__qualname__, sorted(self._session.state.cfg.train.loss_weights.items()))
        measured = [*((each.prefix, each.dataset.fingerprint, each.samples) for each in sets), of_step]
        return hashlib.sha256(repr(measured).encode()).hexdigest()[:16]
