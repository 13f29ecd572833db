"""The helpers of a training loop, with the names and signatures of Megatron-Bridge."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mimo_train.bridge.training.state import SessionState, session_of
from mimo_train.bridge.training.utils.moe_metrics import _build_moe_metric_writer, _MoeMetricFanoutWriter
from mimo_train.bridge.training.utils.norms import (
    calc_dtensor_params_l2_norm,
    calc_params_l2_norm,
    param_is_not_shared,
    report_l2_norm_grad,
)
from mimo_train.bridge.training.utils.reductions import (
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.logging import runtime
from mimo_train.logging.runtime import (
    MEMORY_KEYS,
    report_memory,
    report_runtime,
    report_throughput,
    start_memory_history_recording,
)
from mimo_train.models.heads import (
    LinearForLastLayer,
    ModelHook,
    ModelList,
    _ensure_model_list,
    _freeze_parameter_if_present,
    _register_linear_for_last_layer_mapping,
    create_value_head_hook,
    freeze_moe_router,
    make_value_model,
)
from mimo_train.training.interval import add_step
from mimo_train.training.log import StepNumbers, is_logging_step
from mimo_train.training.step.forward_step import (
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)

__all__ = [
    "MEMORY_KEYS",
    "LinearForLastLayer",
    "ModelHook",
    "ModelList",
    "_MoeMetricFanoutWriter",
    "_build_moe_metric_writer",
    "_ensure_model_list",
    "_freeze_parameter_if_present",
    "_register_linear_for_last_layer_mapping",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "create_value_head_hook",
    "freeze_moe_router",
    "logger",
    "logical_and_across_model_parallel_group",
    "make_value_model",
    "maybe_inject_state",
    "needs_global_state_injection",
    "param_is_not_shared",
    "prepare_forward_step_func",
    "reduce_max_memory_across_pp_group",
    "reduce_max_stat_across_model_parallel_group",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_throughput",
    "start_memory_history_recording",
    "training_log",
]

logger = logging.getLogger(__name__)


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | dict[str, float] | None,
    decoupled_learning_rate: float | None,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | None,
    params_norm: float | None,
    num_zeros_in_grad: int | None,
    config: ConfigContainer,
    global_state: SessionState,
    history_wct: list[float] | None,
    model: list[MegatronModule],
    pg_collection: ProcessGroupCollection | None = None,
    log_max_attention_logit: float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Gather the losses of a step, and at a logging step write everything to the sinks and the console.

    Every rank calls it after every step. Between logging steps nothing leaves the device. A logging step costs one sum
    over the world and one copy to the host, plus `grad_norms` of `log.metrics`.

    Args:
        loss_dict: reduced losses of the step; empty on ranks that have none.
        total_loss_dict: sums since the last logging step, and the counters `advanced iterations`, `skipped iterations`
            and `nan iterations`; starts empty, changed in place, reset by a logging step.
        learning_rate: of the step; by module for several.
        decoupled_learning_rate: of embeddings and output layer, if they have their own.
        loss_scale: logged if it is not 1.
        report_memory_flag: the next logging step prints the memory on the console.
        skipped_iter: 1 if the update was skipped; its losses then do not count.
        grad_norm: over all modules before clipping; None if the update was skipped.
        params_norm: of all parameters.
        num_zeros_in_grad: gradient elements that are zero.
        history_wct: seconds of the latest steps, newest last; only used if `train_step` has made none.
        model: unused.
        pg_collection: unused: memory is the largest over all ranks of the run.
        log_max_attention_logit: largest attention logit, if it is tracked.
        loaded_iteration: unused: the state has the step that this job started from.
        seq_length: tokens of a sample; default: the samples' own number.

    Returns:
        The new `report_memory_flag`: False once memory has been printed.

    Raises:
        TooManyBadSamples: more samples were bad than `data.max_bad_samples` allows, on every rank at the same step.
        UserError: no step was made, or a loss is not one number.
    """
    session, log = session_of(global_state, "training_log"), global_state.log
    seconds = global_state.step_seconds or history_wct
    if not seconds:
        raise UserError("training_log: no step was made. Call train_step first")
    global_state.count_samples()
    log.continue_sums(total_loss_dict)
    log.note(session.data, seconds[-1], global_state.result)
    of_sources = global_state.result.of_sources
    add_step(total_loss_dict, loss_dict, skipped_iter, global_state.step_is_empty, of_sources)
    if not is_logging_step(config, global_state.train_state.step, global_state.last_step):
        return report_memory_flag
    rates = learning_rate if isinstance(learning_rate, dict) else {"all": learning_rate}
    rates = {**rates, "decoupled": decoupled_learning_rate}
    numbers = StepNumbers(
        {name: rate for name, rate in rates.items() if rate is not None},
        grad_norm,
        loss_scale,
        params_norm,
        num_zeros_in_grad,
        log_max_attention_logit,
    )
    return log.write(
        total_loss_dict,
        numbers,
        list(seconds),
        sequence_length=seq_length,
        show_memory=report_memory_flag,
    )


def reduce_max_memory_across_pp_group(
    memory_report: dict[str, int | float], pp_group: dist.ProcessGroup | None
) -> dict[str, int | float]:
    """Return the largest of each value over the stages of a pipeline; see `mimo_train.logging.runtime.largest_over`.
    Collective: one maximum, one copy to the host."""
    return runtime.largest_over(memory_report, pp_group)
