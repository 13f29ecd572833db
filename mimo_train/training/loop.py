"""The training loop, the same for many modules and for a plain GPT."""

from contextlib import ExitStack
from functools import partial

from mimo_train.debug.nan_policy import NanPolicy
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.restarts import stopped_code
from mimo_train.logging import progress as progress_log
from mimo_train.training.callbacks import Callbacks, Profiling, StepChecks
from mimo_train.training.data_setup import nothing_left
from mimo_train.training.evaluating import EvaluationHooks, Evaluator
from mimo_train.training.log import StepLog
from mimo_train.training.saving import Saver
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import AgreedVotes, exit_reason
from mimo_train.training.step.forward_step import ForwardStepCallable, prepare_forward_step_func
from mimo_train.training.step.state import StepResult
from mimo_train.training.train_step import forward_backward, train_step
from mimo_train.training.watching import stop_reason

PASSED_OVER = StepResult()
"""Result of a step of `train.skip_iters`: its samples are consumed without a forward pass or an update."""


def train(
    session: Session,
    forward_step_func: ForwardStepCallable,
    callbacks: Callbacks | None = None,
    evaluation_hooks: EvaluationHooks | None = None,
) -> int:
    """Train until the last step or an exit condition, and return the exit code.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`.
        callbacks: the user's; those of every run are called around them.
        evaluation_hooks: user functions for evaluations.
    """
    state, data, votes, stopwatch = session.state, session.data, session.votes, session.parts.stopwatch
    progress, cfg = state.train_state, state.cfg
    forward_step = prepare_forward_step_func(forward_step_func, state)
    exit_code, votes.agreed = 0, AgreedVotes()
    with ExitStack() as stack:
        events = Callbacks([Profiling(session.profiler), *(callbacks or ())])
        log, saver = StepLog(session, events), Saver(session, events)
        events.add(
            StepChecks(session.model, stack),
            saver,  # before the evaluator: an evaluation that fails or is stopped loses nothing
            Evaluator(session, forward_step, events, saver, evaluation_hooks),
        )
        parts = (session.parts.pipeline, session.optimizer, session.losses)
        nan_policy = NanPolicy(
            state, *parts, partial(forward_backward, *parts, forward_step), save=partial(saver.save_apart, data)
        )
        if progress.step >= state.last_step:
            state.console.message(nothing_left(state))
        events.fire("on_train_start", state, session.model)
        while progress.step < state.last_step and not saver.is_ending:
            RECORDER.begin_step(progress.step + 1)
            events.fire("on_step_start", state)
            session.freeze_stages.apply(progress.step)
            log.start_step()
            with stopwatch("step"):
                if data.advance() is None:  # ranks agreed not to wait for its samples
                    votes.agreed = AgreedVotes(*(data.ended_by or ()))
                    saver.save_and_decide_exit(data, votes.agreed)
                    break
                passed_over = progress.step + 1 in cfg.train.skip_iters
                if passed_over:
                    result = PASSED_OVER
                else:
                    nan_policy.start_step()
                    result = train_step(session, forward_step)
                    nan_policy.end_step(result, data)
            if result.should_checkpoint:
                saver.save(data, "asked by the step", must_succeed=result.should_exit)
            if result.should_exit:
                exit_code = result.exit_code
                break
            progress.count(data.current.size, data.current.plan.tokens, result, passed_over)
            log.end_step(result, data)
            events.fire("on_step_end", state, result)
    saver.finish()
    unfinished = finish(session)
    exit_code = exit_code or unfinished
    events.fire("on_train_end", state, exit_code)
    return exit_code


def finish(session: Session) -> int:
    """End a loop that has not failed: stop profilers, flush the console, write the reason into progress.txt. Returns
    the exit code: 0, or that of a stopped run."""
    state = session.state
    session.profiler.close()
    state.console.close()
    reason = exit_reason(state, session.votes.agreed) or "asked by the step"
    if state.is_logging_rank:
        why = {}
        if state.stopped_early is not None and reason == progress_log.FINISHED:
            why["stop_early"] = stop_reason(state.cfg.train.stop_early, state.train_state.scores)
        progress_log.append(state.run_dir, progress_log.EXIT, step=state.train_state.step, reason=reason, **why)
    return 0 if reason == progress_log.FINISHED else stopped_code()
