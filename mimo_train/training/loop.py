"""The one training loop, and one step of it: the same for many modules and for a plain GPT."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from mimo_train.diagnose.nan_policy import NanPolicy
from mimo_train.evaluation.held_out import evaluate_when_due
from mimo_train.step.callbacks import StepResult
from mimo_train.step.forward_backward import forward_backward
from mimo_train.step.forward_hooks import should_disable_forward_pre_hook
from mimo_train.step.forward_step import ForwardStepCallable, prepare_forward_step_func
from mimo_train.step.saving import _finish_train, checkpoint_and_decide_exit, save_checkpoint_and_time
from mimo_train.step.state import GlobalState
from mimo_train.training.garbage import manual_garbage_collection
from mimo_train.training.log import StepLog
from mimo_train.training.post_step import post_training_step_callbacks

PASSED_OVER = ({}, 0, False, False, 0, None, None)
"""Result of a step of `train.skip_iters`: its samples are passed over, with no forward pass and no update."""


def train(
    forward_step_func: ForwardStepCallable,
    model: list[MegatronModule],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Callable | None,
    global_state: GlobalState,
    checkpointing_context: dict[str, Any],
    process_non_loss_data_func: Callable | None = None,
    non_loss_data_func: Callable | None = None,
) -> int:
    """Train until `train.iters` or an exit condition.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`.
        model: the model chunks of this rank.
        train_data_iterator: a `StepIterator`.
        valid_data_iterator: called without arguments, opens an iterator over the held-out samples; None: no evaluation.
        checkpointing_context: what checkpoints need besides the objects above.
        process_non_loss_data_func: called at evaluations with (data, step, writer) on the logging rank.
        non_loss_data_func: called at evaluations with the model; gives that data.

    Returns:
        The exit code.
    """
    state, progress, train_cfg = global_state, global_state.train_state, global_state.cfg.train
    step_func = prepare_forward_step_func(forward_step_func, state)
    log = StepLog(state, model, optimizer, scheduler)
    nan_policy = NanPolicy(state, step_func, model, optimizer, scheduler, checkpointing_context)
    toggle_hooks = should_disable_forward_pre_hook(False, True, state.cfg.optim.overlap_param_gather)
    exit_code = 0
    state.callbacks.fire("on_train_start", state)
    with manual_garbage_collection(train_cfg.manual_gc_interval):
        while progress.step < train_cfg.iters:
            state.profiler.before_step(progress.step + 1)
            state.callbacks.fire("on_step_start", state)
            state.freeze_stages.apply(progress.step)
            log.start_step()
            with state.stopwatch("step"):
                train_data_iterator.advance()
                result = PASSED_OVER
                if passed_over := progress.step + 1 in train_cfg.skip_iters:
                    progress.skipped_train_samples += train_data_iterator.current.size
                else:
                    nan_policy.start_step()
                    result = train_step(step_func, train_data_iterator, model, optimizer, scheduler, state)
                    nan_policy.end_step(result, train_data_iterator)
            losses, skipped, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros = result
            if should_checkpoint:
                flops_so_far = progress.floating_point_operations_so_far
                saved = (state, model, optimizer, scheduler, flops_so_far, checkpointing_context)
                save_checkpoint_and_time(*saved, train_data_iterator=train_data_iterator)
            if should_exit:
                break
            progress.step += 1
            progress.consumed_train_samples += train_data_iterator.current.size
            progress.skipped_iters += skipped
            state.interval.note_bad_samples(train_data_iterator)
            if not passed_over:
                log.end_step(losses, skipped, grad_norm, num_zeros, train_data_iterator)
            state.callbacks.fire("on_step_end", state, StepResult(losses, skipped, grad_norm, num_zeros))
            post_training_step_callbacks(
                model, log.flops, log.stragglers, progress.step, state.profiler.torch, state.cfg, toggle_hooks,
                state.profiler.nvtx,
            )  # fmt: skip
            evaluate_when_due(
                step_func, model, valid_data_iterator, state, process_non_loss_data_func, non_loss_data_func
            )
            flops_so_far = progress.floating_point_operations_so_far
            saved = (state, model, optimizer, scheduler, flops_so_far, checkpointing_context, train_data_iterator)
            if checkpoint_and_decide_exit(*saved):
                break
    _finish_train(state)
    state.callbacks.fire("on_train_end", state, exit_code)
    return exit_code


def train_step(
    forward_step_func: ForwardStepCallable,
    data_iterator: Any,
    model: list[MegatronModule],
    optimizer: Any,
    scheduler: Any,
    global_state: GlobalState,
) -> tuple[dict[str, torch.Tensor], int, bool, bool, int, float | None, int | None]:
    """Forward and backward over the step's microbatches, then one optimizer step.

    Returns:
        (losses reduced over microbatches and data-parallel ranks; 1 if the update was skipped, else 0; whether a
        checkpoint should be saved; whether to exit; exit code; gradient norm over all modules before clipping,
        not finite if that is why the update was skipped, None if the step asks to exit; number of zero gradients, None
        unless counted). Losses are there on ranks of the language model's last stage; elsewhere the dict is empty.
    """
    microbatches = len(data_iterator.current.microbatches)
    for _ in global_state.rerun.runs(data_iterator):
        forward_backward(forward_step_func, data_iterator, model, optimizer, global_state, microbatches)
    should_checkpoint, should_exit, exit_code = global_state.rerun.verdict()
    if should_exit:
        return {}, 1, should_checkpoint, should_exit, exit_code, None, None
    with global_state.stopwatch("optimizer"):
        updated, grad_norm, num_zeros = optimizer.step()
    if updated:
        scheduler.step(increment=1)
    losses = global_state.losses.reduced()
    if losses:
        losses |= global_state.pipeline.balancing.reduced()
    return losses, int(not updated), should_checkpoint, should_exit, exit_code, grad_norm, num_zeros
