"""The one training loop, and one step of it: the same for many modules and for a plain GPT."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from mimo_train.config import LANGUAGE
from mimo_train.training.checkpointing import checkpoint_and_decide_exit
from mimo_train.training.evaluate import evaluate_when_due
from mimo_train.training.forward_step import ForwardStepCallable, prepare_forward_step_func
from mimo_train.training.log import StepLog
from mimo_train.training.losses import reduce_losses
from mimo_train.training.state import GlobalState


def train(
    forward_step_func: ForwardStepCallable,
    model: list[MegatronModule],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Callable | None,
    global_state: GlobalState,
    checkpointing_context: dict[str, Any],
) -> int:
    """Train until `train.iters` or an exit condition.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`.
        model: the model chunks of this rank.
        train_data_iterator: a `StepIterator`.
        valid_data_iterator: called without arguments, opens an iterator over the held-out samples; None: no evaluation.
        checkpointing_context: what checkpoints need besides the objects above.

    Returns:
        The exit code.
    """
    state, progress = global_state, global_state.train_state
    step_func = prepare_forward_step_func(forward_step_func, state)
    log = StepLog(state, scheduler)
    while progress.step < state.cfg.train.iters:
        log.start_step()
        train_data_iterator.advance()
        losses, skipped, _, should_exit, exit_code, grad_norm, _ = train_step(
            step_func, train_data_iterator, model, optimizer, scheduler, state
        )
        progress.step += 1
        progress.consumed_train_samples += state.layout.global_batch_size
        progress.skipped_iters += skipped
        log.end_step(losses, grad_norm, skipped, train_data_iterator.bad)
        evaluate_when_due(step_func, model, valid_data_iterator, state)
        if checkpoint_and_decide_exit(state, model, optimizer, scheduler, checkpointing_context) or should_exit:
            return exit_code
    return 0


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
        checkpoint should be saved; whether to exit; exit code; gradient norm over all modules before clipping, None
        if skipped; number of zero gradients, None unless counted). Losses are there on ranks of the language model's
        last stage; elsewhere the dict is empty.
    """
    pipeline, cfg = global_state.pipeline, global_state.cfg
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = pipeline.run(forward_step_func, data_iterator, model, sequence_length=cfg.data.sequence_length)
    updated, grad_norm, num_zeros = optimizer.step()
    if updated:
        scheduler.step(increment=1)
    losses = {}
    if pipeline.is_last_stage:
        losses = reduce_losses(reports, pipeline.groups.collections[LANGUAGE].dp_cp)
    return losses, int(not updated), False, False, 0, grad_norm, num_zeros
