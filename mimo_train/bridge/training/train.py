"""The loop and its parts, with the names and signatures of Megatron-Bridge."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.profiler import profile

from mimo_train.bridge.training.state import SessionState, session_of
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.debug.profiling import NsysCapture, folder_of_rank, records, write_memory_snapshot
from mimo_train.evaluation.held_out import HeldOut
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.rank_monitor import working
from mimo_train.launch.restarts import stopped_code
from mimo_train.layout.run import resolve
from mimo_train.logging import progress
from mimo_train.logging.stopwatch import StragglerTimer
from mimo_train.models.parameters import overlapping_chunks
from mimo_train.training import loop
from mimo_train.training.callbacks import check_replicas_and_collect_garbage
from mimo_train.training.data_setup import decided_by
from mimo_train.training.evaluating import EvaluationHooks
from mimo_train.training.log import is_logging_step
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import AgreedVotes
from mimo_train.training.step.forward_step import ForwardStepCallable
from mimo_train.training.train_step import train_step as one_step


def train(
    forward_step_func: ForwardStepCallable,
    model: list[MegatronModule],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: HeldOut | None,
    global_state: SessionState,
    checkpointing_context: dict[str, Any],
    process_non_loss_data_func: Callable | None = None,
    non_loss_data_func: Callable | None = None,
) -> int:
    """Train until the last step or an exit condition.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`.
        model, optimizer, scheduler, train_data_iterator: those of `setup`.
        valid_data_iterator: that of `setup`, or None: no evaluation.
        checkpointing_context: unused: the session of the state has a `Checkpointer`.
        process_non_loss_data_func: called at evaluations with (data, step, writer) on the logging rank.
        non_loss_data_func: called at evaluations with the model; returns that data. Without it, the data is a list of
            the loss function's results with `non_loss_data=True` for each microbatch of the first held-out step. For
            the shipped steps these are {"losses": loss per token, "loss_mask": 1 where it counts}, both [batch,
            sequence].

    Returns:
        The exit code.
    """
    session = session_of(global_state, "train")
    _require_own(session, model=model, optimizer=optimizer, scheduler=scheduler, data=train_data_iterator)
    if valid_data_iterator is not session.held_out:  # that of `setup` stands for all held-out sets
        tests = [each for each in session.held_out_sets if each.is_test]
        validation = [] if valid_data_iterator is None else [valid_data_iterator]
        session = replace(session, held_out_sets=(*validation, *tests))
    hooks = None
    if process_non_loss_data_func is not None or non_loss_data_func is not None:
        hooks = EvaluationHooks(process_non_loss_data_func, non_loss_data_func)
    with working():
        return loop.train(session, forward_step_func, global_state.callbacks, hooks)


def train_step(
    forward_step_func: ForwardStepCallable,
    data_iterator: Any,
    model: list[MegatronModule],
    optimizer: Any,
    scheduler: Any,
    global_state: SessionState,
) -> tuple[dict[str, torch.Tensor], int, bool, bool, int, float | None, int | None]:
    """Make one step: forward and backward over the microbatches of the next step, then the update.

    It counts the consumed samples and tokens in `train_state`; the caller counts `train_state.step`. `train.on_nan`
    applies as in `train`.

    Args:
        forward_step_func: as the schedule calls it (see `prepare_forward_step_func`).
        data_iterator, model, optimizer, scheduler: those of `setup`. If the caller has called the iterator's `advance`,
            to look at the samples, that step is made.

    Raises:
        UserError: all steps of the run are done, more of them were empty than `train.max_empty_steps` allows, or
            `train.skip_iters` is set.
        NonFiniteStep: a gradient was not finite, and `train.on_nan` ends the run.
        TooManyBadSamples: more samples were bad than `data.max_bad_samples` allows, on every rank at the same step.
        SystemExit: a signal asked the run to end, and the caller's loop continued; a checkpoint is saved.

    Returns:
        The fields of `StepResult` in this order: (losses, skipped_iter, should_checkpoint, should_exit, exit_code,
            grad_norm, num_zeros_in_grad).
    """
    session = session_of(global_state, "train_step")
    _require_own(session, model=model, optimizer=optimizer, scheduler=scheduler, data=data_iterator)
    progress, began = global_state.train_state, time.perf_counter()
    if skipped := global_state.cfg.train.skip_iters:
        raise UserError(f"train.skip_iters: is {skipped}, and train_step skips no step. Call train() or remove the key")
    with working():
        _end_if_stopped(global_state)
        RECORDER.begin_step(progress.step + 1)
        session.freeze_stages.apply(progress.step)
        with session.parts.stopwatch("step"):
            result = None
            if data_iterator.is_fresh or data_iterator.advance() is not None:
                nan_policy = global_state.nan_policy(forward_step_func)
                nan_policy.start_step()
                result = one_step(session, forward_step_func)
                nan_policy.end_step(result, data_iterator)
        if result is None:
            _end_if_stopped(global_state)
            raise UserError(
                f"train_step: the {session.state.last_step} steps of {decided_by(session.state)} have been made, and "
                "the data ends with them"
            )
        global_state.count_step(result, time.perf_counter() - began)
    asked = (result.should_checkpoint, result.should_exit, result.exit_code)
    return result.losses, result.skipped_iter, *asked, result.grad_norm, result.num_zeros_in_grad


def _end_if_stopped(state: SessionState) -> None:
    """Save and end a loop that continues after all ranks have agreed on a signal. Collective."""
    votes, data = state.session.votes, state.session.data
    if data.ended_by is not None:
        votes.agreed = AgreedVotes(*data.ended_by)
    if votes.agreed.signalled or data.ended_by is not None:
        state.count_samples()
        state.saver.save_and_decide_exit(data, votes.agreed)
        _finish_train(state)
        raise SystemExit(stopped_code())


def post_training_step_callbacks(
    model: list[MegatronModule],
    num_floating_point_operations_since_last_log_event: float,
    straggler_timer: Any,
    iteration: int,
    prof: profile | None,
    config: ConfigContainer,
    should_toggle_forward_pre_hook: bool,
    nsys_nvtx_context: NsysCapture | None = None,
) -> None:
    """Do what is due after a step; called by every rank after every step.

    - `straggler` of `log.metrics`: the report of `straggler_timer` (that of the state, or None), at logging steps;
    - `train.rerun`, unless disabled: a comparison of data-parallel replicas before `checkpoint.save_interval` saves;
    - `profiling`: the end of the recording, after its last step;
    - `train.manual_gc_interval`: garbage collection.

    Args:
        num_floating_point_operations_since_last_log_event: unused: the timer has those of the interval.
        iteration: steps done.
        prof: torch's profiler, while it records.
        should_toggle_forward_pre_hook: unused: the comparison waits for parameters that are being gathered.
        nsys_nvtx_context: the capture of nsys, while it records.

    Raises:
        RuntimeError: replicas hold different weights.
    """
    if isinstance(straggler_timer, StragglerTimer) and is_logging_step(config, iteration, config.train.iters):
        straggler_timer.report()
    if iteration == config.profiling.steps[1]:
        if prof is not None:
            prof.stop()
        if nsys_nvtx_context is not None:
            nsys_nvtx_context.__exit__(None, None, None)
        if "memory_history" in config.profiling.record and records(config.profiling):
            write_memory_snapshot(folder_of_rank(Path(config.run.dir)), iteration)
    check_replicas_and_collect_garbage(config, model, iteration)


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    """True if forward pre-hooks must be off while a checkpoint is written: with the distributed optimizer and
    overlapped gathering, except under Megatron-FSDP, which gathers differently."""
    return not use_megatron_fsdp and use_distributed_optimizer and overlap_param_gather


def enable_forward_pre_hook(model: list[DistributedDataParallel]) -> None:
    """Restore the hooks that wait for parameters; `model` has wrapped modules, or a `MimoModel` of them."""
    for chunk in overlapping_chunks(model):
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: list[DistributedDataParallel], param_sync: bool = True) -> None:
    """Remove the hooks that wait for parameters; `model` has wrapped modules, or a `MimoModel` of them. With
    `param_sync`, gather at once what the last step updated; collective then."""
    for chunk in overlapping_chunks(model):
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def save_checkpoint_and_time(
    state: SessionState,
    model: list,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
) -> None:
    """Save everything, and report it to progress.txt, the console and the callbacks. Collective.

    Args:
        model, optimizer, opt_param_scheduler: those of `setup`.
        num_floating_point_operations_so_far: of the full run, written to progress.txt.
        checkpointing_context: unused: the session of the state has a `Checkpointer`.
        non_persistent_ckpt: save the kind of which only the newest is kept.
        train_data_iterator: that of `setup`; its position is stored even without it.
    """
    session = session_of(state, "save_checkpoint_and_time")
    parts = {"model": model, "optimizer": optimizer, "scheduler": opt_param_scheduler}
    _require_own(session, **parts, data=train_data_iterator)
    state.count_samples()
    state.train_state.floating_point_operations_so_far = num_floating_point_operations_so_far
    state.saver.save(session.data, "asked", non_persistent=non_persistent_ckpt)


def checkpoint_and_decide_exit(
    state: SessionState,
    model: list,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    train_data_iterator: Any,
) -> bool:
    """Save if due, with the arguments of `save_checkpoint_and_time`; see `Saver.save_and_decide_exit`."""
    session = session_of(state, "checkpoint_and_decide_exit")
    parts = {"model": model, "optimizer": optimizer, "scheduler": opt_param_scheduler}
    _require_own(session, **parts, data=train_data_iterator)
    state.count_samples()
    state.train_state.floating_point_operations_so_far = num_floating_point_operations_so_far
    return state.saver.save_and_decide_exit(session.data, session.votes.agreed)


def _finish_train(global_state: SessionState) -> None:
    """Wait for a save in flight, and end the loop as `loop.finish` does. Collective."""
    session = session_of(global_state, "_finish_train")
    global_state.saver.finish()
    loop.finish(session)


def get_start_time_from_progress_log(cfg: ConfigContainer) -> tuple[datetime, float]:
    """Return the start time and FLOPs of `mimo_train.logging.progress.start_of_jobs`."""
    run = resolve(cfg)
    return progress.start_of_jobs(run.dir, run.layout.world_size)


def compute_throughputs_and_append_to_progress_log(
    state: SessionState, num_floating_point_operations_so_far: float
) -> None:
    """Write FLOPs, tokens and throughput of the run so far into progress.txt. Called on one rank."""
    progress.throughput(
        state.run_dir,
        world_size=state.layout.world_size,
        step=state.train_state.step,
        tokens=state.train_state.consumed_train_tokens,
        flops=num_floating_point_operations_so_far,
        job_seconds=state.job_seconds,
    )


def _handle_mxfp8_param_buffer_copy(
    optimizer: MegatronOptimizer, reuse_grad_buf_for_mxfp8_param_ag: bool, overlap_param_gather: bool
) -> None:
    """Copy main parameters to the buffer that is gathered, if it is the gradient buffer (MXFP8).

    With overlap, gathering begins in the next forward pass, after the buffer has been zeroed for its gradients. So the
    copy follows the zeroing. `optimizer` is of one module, of several (a `MimoOptimizer`), or a chain.
    """
    if not (reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather):
        return
    if hasattr(optimizer, "module_infos"):
        parts = [info.optimizer for info in optimizer.module_infos.values() if info.optimizer is not None]
    else:
        parts = getattr(optimizer, "chained_optimizers", [])
    for part in parts:
        _handle_mxfp8_param_buffer_copy(part, True, True)
    if not parts and hasattr(optimizer, "_copy_main_params_to_param_buffer"):
        optimizer._copy_main_params_to_param_buffer()


def _require_own(session: Session, model: list, optimizer: Any, scheduler: Any, data: Any = None) -> None:
    """Raise UserError for objects of another session, which these functions would silently ignore."""
    expected = {"model": session.model, "optimizer": session.optimizer, "scheduler": session.schedulers}
    passed = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if data is not None:
        expected["train_data_iterator"], passed["train_data_iterator"] = session.data, data
    foreign = [name for name, value in passed.items() if value is not expected[name]]
    if foreign:
        raise UserError(
            f"{' and '.join(foreign)} must be what mimo_train.bridge.training.setup.setup returned with this state"
        )
