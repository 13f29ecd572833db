"""The one training loop: the same for many modules and for a plain GPT."""

from functools import partial

from mimo_train.debug.nan_policy import NanPolicy
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.restarts import stopped_code
from mimo_train.logging import progress as progress_log
from mimo_train.training.between_steps import BetweenSteps
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.data_setup import nothing_left
from mimo_train.training.evaluating import EvaluationHooks, Evaluations
from mimo_train.training.garbage import manual_garbage_collection
from mimo_train.training.log import StepLog
from mimo_train.training.saving import Saver, exit_reason
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import AgreedVotes, agreed_votes
from mimo_train.training.step.forward_step import ForwardStepCallable, prepare_forward_step_func
from mimo_train.training.step.state import StepResult
from mimo_train.training.train_step import TrainStep

PASSED_OVER = StepResult()
"""Result of a step of `train.skip_iters`: its samples are consumed without a forward pass or an update."""


def train(
    session: Session,
    forward_step_func: ForwardStepCallable,
    callbacks: Callbacks | None = None,
    evaluation_hooks: EvaluationHooks | None = None,
) -> int:
    """Train until the last step or an exit condition.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`.
        evaluation_hooks: user functions for evaluations.

    Returns:
        The exit code.
    """
    state, parts, data, callbacks = session.state, session.parts, session.data, callbacks or Callbacks()
    progress, cfg = state.train_state, state.cfg.train
    step_func = prepare_forward_step_func(forward_step_func, state)
    step = TrainStep(session, step_func)
    log, saver = StepLog(session, callbacks), Saver(session, callbacks)
    watched = (state, parts.pipeline, session.optimizer, session.losses, step.forward_backward)
    nan_policy = NanPolicy(*watched, save=partial(saver.save_apart, data))
    between_steps = BetweenSteps(state.run, session.model, session.profiler)
    evaluations = Evaluations(session, step_func, callbacks, evaluation_hooks)
    exit_code = 0
    if progress.step >= state.last_step:
        state.console.message(nothing_left(state))
    callbacks.fire("on_train_start", state, session.model)
    with manual_garbage_collection(cfg.manual_gc_interval):
        votes = evaluations.when_missing()
        ending = votes != AgreedVotes() and saver.save_and_decide_exit(data, votes)
        while progress.step < state.last_step and not ending:
            RECORDER.begin_step(progress.step + 1)
            session.profiler.before_step(progress.step + 1)
            callbacks.fire("on_step_start", state)
            session.freeze_stages.apply(progress.step)
            log.start_step()
            with parts.stopwatch("step"):
                if data.advance() is None:  # ranks have agreed not to wait for its samples
                    votes = agreed_votes(session.optimizer, data)
                    saver.save_and_decide_exit(data, votes)
                    break
                passed_over = progress.step + 1 in cfg.skip_iters
                if not passed_over:
                    nan_policy.start_step()
                result = PASSED_OVER if passed_over else step()
                if not passed_over:
                    nan_policy.end_step(result, data)
            if result.should_checkpoint:
                saver.save(data, "asked by the step", must_succeed=result.should_exit)
            if result.should_exit:
                exit_code = result.exit_code
                break
            progress.count(data.current.size, data.current.plan.tokens, result, passed_over)
            session.bad_samples.note(data)
            if passed_over:
                log.write_when_due()
            else:
                log.end_step(result, data)
            callbacks.fire("on_step_end", state, result)
            between_steps(progress.step)
            votes = agreed_votes(session.optimizer)
            # The save first: an evaluation that fails or is stopped loses nothing.
            ending = saver.save_and_decide_exit(data, votes)
            if (after := evaluations.when_due(votes)) != votes:
                votes, ending = after, saver.save_and_decide_exit(data, after)
    saver.finish()
    unfinished = finish(session, votes)
    exit_code = exit_code or unfinished
    callbacks.fire("on_train_end", state, exit_code)
    return exit_code


def finish(session: Session, votes: AgreedVotes | None = None) -> int:
    """End a loop that has not failed: stop profilers, flush the console, write the reason into progress.txt.

    Args:
        votes: the last ones of all ranks; None: those of the last step.

    Returns:
        The exit code, of a run that may not be finished.
    """
    state = session.state
    session.profiler.close()
    state.console.close()
    votes = votes or agreed_votes(session.optimizer, session.data)
    reason = exit_reason(state, votes) or "asked by the step"
    if state.is_logging_rank:
        progress_log.job_exited(state.run_dir, step=state.train_state.step, reason=reason)
    return 0 if reason == progress_log.FINISHED else stopped_code()
