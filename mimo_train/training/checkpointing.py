"""When the loop saves and when it ends."""

from typing import Any

from mimo_train.checkpoint.store import save_checkpoint
from mimo_train.metrics import progress as progress_log
from mimo_train.training.state import GlobalState


def checkpoint_and_decide_exit(
    state: GlobalState, model: list, optimizer: Any, opt_param_scheduler: Any, checkpointing_context: dict[str, Any]
) -> bool:
    """Save if the step is due, the last one, or a rank was asked to end; return whether the loop should end.

    Collective: every rank decides the same at the same step.
    """
    progress, cfg = state.train_state, state.cfg
    interval = cfg.checkpoint.save_interval
    asked_to_end = state.pipeline.exit_agreed()
    due = interval > 0 and progress.step % interval == 0
    if due or asked_to_end or progress.step == cfg.train.iters:
        save_checkpoint_and_time(state, model, optimizer, opt_param_scheduler, checkpointing_context)
    if asked_to_end and state.is_logging_rank:
        progress_log.job_exited(state.run_dir, step=progress.step, reason="signal")
        state.console.message(f"a signal asked to end: saved at step {progress.step}; the same command goes on")
    return asked_to_end


def save_checkpoint_and_time(
    state: GlobalState, model: list, optimizer: Any, opt_param_scheduler: Any, checkpointing_context: dict[str, Any]
) -> None:
    """Save everything and note it in progress.txt; the time goes to the timer `save-checkpoint`."""
    state.timers("save-checkpoint", log_level=0).start()
    folder = save_checkpoint(
        state.run_dir,
        state.cfg,
        state.layout,
        model[0],
        optimizer,
        opt_param_scheduler,
        state.train_state,
        checkpointing_context["data_fingerprint"],
        state.cfg.checkpoint.keep,
    )
    state.timers("save-checkpoint").stop()
    if state.is_logging_rank:
        progress_log.checkpoint_saved(state.run_dir, step=state.train_state.step, path=folder)
