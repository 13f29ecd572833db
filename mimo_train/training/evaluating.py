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
from mimo_train.logging.metrics_log import RECORD
from mimo_train.logging.report.page import held_out_samples
from mimo_train.logging.sinks.jsonl import iter_metrics
from mimo_train.training.callbacks import Callback, Callbacks
from mimo_train.training.saving import Saver
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import AgreedVotes, is_due
from mimo_train.training.step.forward_step import ForwardStepCallable
from mimo_train.training.step.state import GlobalState, StepResult
from mimo_train.training.watching import missing, note_scores, stop_reason


@dataclass(frozen=True)
class EvaluationHooks:
    """User functions for evaluations."""

    process: Callable[[Any, int, Any], None] | None = None
    """Called as (data, step, writer) on the logging rank; `writer` is TensorBoard's `SummaryWriter` or None."""
    give: Callable[[list], Any] | None = None
    """Called as (model) on every rank; returns the data. Without it, the data is the list of the loss functions'
    results with non_loss_data=True for the microbatches of the first held-out step."""


class Evaluator(Callback):
    """Evaluates each held-out set at its interval, and all sets and the test sets after the last step. Keeps the best
    checkpoints and ends the run early, as the config says.

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
        if state.train_state.step:
            self._evaluate_due(StepResult(), resumed=True)

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        """Evaluate if due; the next job does it if a rank was asked to end the run. Collective."""
        self._evaluate_due(result)

    def _evaluate_due(self, result: StepResult, *, resumed: bool = False) -> None:
        """Evaluate the sets that are due, and act on the metrics that the config watches.

        Args:
            resumed: sets that an earlier job has evaluated at this step are not evaluated again.
        """
        state, votes, before = self._session.state, self._session.votes, self._session.votes.agreed
        watch, sets = state.cfg.train.stop_early, self._due()
        values = self._values(sets, resumed)
        if values is not None and sets:
            during = [each.prefix for each in self._session.held_out_sets if not each.is_test]
            note_scores(state, values, [each.prefix for each in sets], during)
            reason = stop_reason(watch, state.train_state.scores)
            if reason and state.stopped_early is None and state.train_state.step < state.last_step:
                state.console.message(f"stopping early at step {state.train_state.step}: {reason}")
                state.stopped_early = state.train_state.step
                others = [each for each in self._session.held_out_sets if each not in sets]
                if others and (values := self._values(others, resumed)) is not None:
                    note_scores(state, values, [each.prefix for each in others], during)
            if state.cfg.checkpoint.keep_best.metric:
                self._saver.keep_best()
        if votes.agreed != before or state.stopped_early is not None:
            self._saver.on_step_end(state, result)

    def _values(self, sets: list[HeldOut], resumed: bool) -> dict[str, float] | None:
        """Return the values of an evaluation, of an earlier job if `resumed` and it has made it; None if votes have
        ended it. The values are on ranks of the last stage only. Collective."""
        if not sets:
            return {}
        if resumed:
            state, device = self._session.state, self._session.parts.pipeline.device
            values = self._values_of_earlier_job(sets) if state.is_logging_rank else None
            is_done = torch.tensor(int(values is not None), device=device)
            dist.all_reduce(is_done)
            if int(is_done):
                return values or {}
        return self._evaluate(sets)

    def _evaluate(self, sets: list[HeldOut]) -> dict[str, float] | None:
        """Evaluate `sets`, write the values, and return them; None if votes have ended the evaluation. Sets the
        session's votes, including those."""
        state, votes = self._session.state, self._session.votes.agreed
        step = state.train_state.step
        is_last = step == state.last_step
        if votes.signalled or votes.out_of_time:
            self._session.votes.agreed = AgreedVotes(votes.signalled, votes.out_of_time, evaluation_left=is_last)
            return None
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
            self._session.votes.agreed = AgreedVotes(*stopped.votes, evaluation_left=is_last)
            return None
        finally:
            bar.close()
        self._write(values, sets)
        hooks = self._hooks
        if hooks is not None and not sets[0].is_test:
            data = sets[0].non_loss_data(self._step_func, hooks.give)
            if hooks.process is not None and state.is_logging_rank:
                hooks.process(data, step, state.tensorboard_logger)
        self._callbacks.fire("on_evaluation", state, values)
        return values

    def _due(self) -> list[HeldOut]:
        state, sets = self._session.state, self._session.held_out_sets
        step = state.train_state.step
        if step == state.last_step:
            return list(sets)
        return [each for each in sets if is_due(each.interval, step) and not each.is_test]

    def _values_of_earlier_job(self, sets: list[HeldOut]) -> dict[str, float] | None:
        """Return the values of these sets at this step from metrics.jsonl; None if no earlier job has evaluated them,
        or not all that the config watches."""
        state, is_done, values = self._session.state, False, dict[str, float]()
        step, prefixes = str(state.train_state.step), [each.prefix for each in sets]
        with suppress(OSError):
            for _, kind, facts in progress.events(state.run_dir):
                if kind == progress.START and facts.get("step", step).isdigit() and int(facts["step"]) < int(step):
                    is_done = False  # a later job trained this step again
                is_of_sets = kind == progress.EVALUATION and any(f"{prefix}samples" in facts for prefix in prefixes)
                if is_of_sets and facts.get("step") == step:
                    is_done = facts.get("sets") == self._digest(sets)
            for line in iter_metrics(state.run_dir / RECORD) if is_done else ():
                if line["step"] == state.train_state.step:
                    values |= line
        if not is_done or any(f"{prefix}samples" not in values for prefix in prefixes):
            return None
        return None if missing(state.cfg, values, prefixes, prefixes) else values

    def _write(self, values: dict[str, float], sets: list[HeldOut]) -> None:
        state, step = self._session.state, self._session.state.train_state.step
        if not state.is_logging_rank:
            return
        state.metrics.log(step, state.train_state.consumed_train_samples, values)
        state.console.evaluation(step, values)
        first = self._session.held_out_sets[0]
        if first in sets and f"{first.prefix}exact_match" in values and state.cfg.train.report_samples:
            state.metrics.samples(step, held_out_samples(state.run_dir / "samples.json")[0])
        for each in sets:
            if values[f"{each.prefix}samples"] == 0:
                name = each.prefix.removeprefix("eval/").rstrip("/")
                state.console.message(
                    f"evaluation{name and f' of {name}'}: no held-out sample has a token with loss. Answers are empty, "
                    "cut by data.sequence_length, or the samples are bad"
                )
        is_predicted = f"{sets[0].prefix}exact_match" in values or state.cfg.traits.form == "labels"
        if not self._told_no_text and not is_predicted:
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
        measured: list[object] = [(each.prefix, each.dataset.fingerprint, each.samples) for each in sets]
        measured += [of_step, *(each.metrics for each in sets if each.metrics)]
        return hashlib.sha256(repr(measured).encode()).hexdigest()[:16]
