"""When the loop saves and when it ends."""

from pathlib import Path
from typing import Any

from mimo_train.checkpoint.store import save_checkpoint
from mimo_train.metrics import progress as progress_log
from mimo_train.step.forward_hooks import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    should_disable_forward_pre_hook,
)
from mimo_train.step.state import GlobalState

FINISHED = "finished"
"""Reason of an exit after `train.iters` steps."""

EXPLAINED = {
    "signal": "a signal asked to end",
    "exit_duration_minutes": "train.exit_duration_minutes {train.exit_duration_minutes:g} have passed",
    "exit_interval": "train.exit_interval {train.exit_interval} is reached",
}
"""What the console says for each reason to end before the last step."""


_SAVED = "saved step"
"""Key of `checkpointing_context`: the last step with a persistent checkpoint of this job."""


def exit_reason(state: GlobalState) -> str | None:
    """Why the run ends after this step: finished, signal, exit_duration_minutes or exit_interval; None: it goes on.
    The same on every rank."""
    train, step = state.cfg.train, state.train_state.step
    if step >= train.iters:
        return FINISHED
    signalled, out_of_time = state.pipeline.agreed_votes()
    if signalled:
        return "signal"
    if out_of_time:
        return "exit_duration_minutes"
    return "exit_interval" if _due(train.exit_interval, step) else None


def checkpoint_and_decide_exit(
    state: GlobalState,
    model: list,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    train_data_iterator: Any,
) -> bool:
    """Save once if the step is due, and return whether the loop should end.

    A checkpoint is due when the run ends, for whatever `exit_reason`, every `checkpoint.save_interval` steps, and, of
    the non-persistent kind, every `checkpoint.non_persistent_interval` steps where no other is due. Collective: every
    rank decides the same at the same step.
    """
    step, checkpoint = state.train_state.step, state.cfg.checkpoint
    ending = exit_reason(state)
    due = ending or ("save_interval" if _due(checkpoint.save_interval, step) else None)
    non_persistent = due is None and _due(checkpoint.non_persistent_interval, step)
    if (due or non_persistent) and checkpointing_context.get(_SAVED) != step:
        save_checkpoint_and_time(
            state,
            model,
            optimizer,
            opt_param_scheduler,
            num_floating_point_operations_so_far,
            checkpointing_context,
            non_persistent_ckpt=non_persistent,
            train_data_iterator=train_data_iterator,
            reason=due or "non_persistent_interval",
        )
    if ending in EXPLAINED and state.is_logging_rank:
        why = EXPLAINED[ending].format(train=state.cfg.train)
        state.console.message(f"{why}: saved at step {step}; the same command goes on")
    return ending is not None


def save_checkpoint_and_time(
    state: GlobalState,
    model: list,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    reason: str = "asked",
    run_dir: Path | None = None,
) -> None:
    """Save everything, note it in progress.txt and on the console, and tell the callbacks. Collective.

    The time goes to the timer `save-checkpoint`. Forward pre-hooks are off meanwhile where parameters would still be on
    their way.

    Args:
        num_floating_point_operations_so_far: of the whole run, noted in progress.txt.
        checkpointing_context: what a checkpoint holds besides the objects above; keeps the step that was saved.
        non_persistent_ckpt: whether it is one of those of which only the newest stays.
        train_data_iterator: where it stands is `state.train_state.consumed_train_samples`, which is saved; it has no
            state of its own.
        reason: why it is saved.
        run_dir: where it is saved and all others are kept, instead of `run.dir` with its `checkpoint.keep`.
    """
    timer = state.timers("save-checkpoint", log_level=0)
    timer.start()
    toggle = should_disable_forward_pre_hook(False, True, state.cfg.optim.overlap_param_gather)
    if toggle:
        disable_forward_pre_hook(model)
    if state.interval is not None:  # inside the loop
        # Those since the last logging step are not counted yet, and a run that resumes here does not read them again.
        state.train_state.bad_samples += state.interval.take_bad_samples()
    folder = save_checkpoint(
        run_dir or state.run_dir,
        state.cfg,
        state.layout,
        model,
        optimizer,
        opt_param_scheduler,
        state.train_state,
        checkpointing_context["data_fingerprint"],
        0 if run_dir else state.cfg.checkpoint.keep,
        non_persistent_ckpt,
        state.rerun.state_dict(train_data_iterator),
    )
    if toggle:
        enable_forward_pre_hook(model)
    timer.stop()
    if not non_persistent_ckpt:
        checkpointing_context[_SAVED] = state.train_state.step
    if state.is_logging_rank:
        progress_log.checkpoint_saved(state.run_dir, step=state.train_state.step, path=folder, reason=reason)
        progress_log.compute_throughputs_and_append_to_progress_log(state, num_floating_point_operations_so_far)
        state.console.message(f"checkpoint of step {state.train_state.step} ({reason}): {folder}")
    state.callbacks.fire("on_checkpoint", state, folder)


def _finish_train(global_state: GlobalState) -> None:
    """End a loop that has not failed: end the profilers, show what the console holds back, note why in progress.txt."""
    state = global_state
    state.profiler.close()
    if state.is_logging_rank:
        state.console.close()
        reason = exit_reason(state) or "asked by the step"
        progress_log.job_exited(state.run_dir, step=state.train_state.step, reason=reason)


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
