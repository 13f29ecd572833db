"""Logging and statistics with the names and signatures of Megatron-Bridge."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mimo_train.compat.state import SessionState, session_of
from mimo_train.config.schema import ConfigContainer
from mimo_train.metrics import memory_stats
from mimo_train.metrics.memory_stats import MEMORY_KEYS, report_memory, start_memory_history_recording
from mimo_train.metrics.runtime import report_runtime, report_throughput
from mimo_train.training.interval import add_step
from mimo_train.training.log import StepNumbers, is_logging_step

__all__ = [
    "MEMORY_KEYS",
    "reduce_max_memory_across_pp_group",
    "report_memory",
    "report_runtime",
    "report_throughput",
    "start_memory_history_recording",
    "training_log",
]


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
    history_wct: list[float],
    model: list[MegatronModule],
    pg_collection: ProcessGroupCollection | None = None,
    log_max_attention_logit: float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Gather the losses of a step, and at a logging step write everything to the sinks and the console.

    Called by every rank after every step. Between logging steps nothing leaves the device; at one, there is one sum
    over the world and one copy to the host, plus those of `log.grad_norms` if it is on.

    Args:
        loss_dict: reduced losses of the step; empty on ranks that have none.
        total_loss_dict: sums since the last logging step, and the counters `advanced iterations`, `skipped iterations`
            and `nan iterations`; starts empty, changed in place, at zero again after a logging step.
        learning_rate: of the step; by module for several.
        decoupled_learning_rate: that of embeddings and output layer, if they have one.
        loss_scale: logged if it is not 1.
        report_memory_flag: whether the next logging step prints the memory on the console.
        skipped_iter: 1 if the update was skipped, whose losses then do not count.
        grad_norm: over all modules before clipping; None if the update was skipped.
        params_norm: of all parameters.
        num_zeros_in_grad: gradient elements that are zero.
        history_wct: seconds of the latest steps, newest last.
        model: the model chunks of this rank.
        pg_collection: not needed: memory is the largest over all ranks of the run, those of the model's pipeline among
            them.
        log_max_attention_logit: largest attention logit, if it is tracked.
        loaded_iteration: step that this job started from.
        seq_length: tokens of a sample; default: as many as the samples have.

    Returns:
        The new `report_memory_flag`: False once memory has been printed.

    Raises:
        TooManyBadSamples: more samples were bad than `data.max_bad_samples` allows, on every rank at the same step.
    """
    session, log = session_of(global_state, "training_log"), global_state.log
    session.bad_samples.note(session.data)
    log.note(session.data, history_wct[-1])
    add_step(total_loss_dict, loss_dict, skipped_iter, session.empty_steps.note())
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
        history_wct,
        loaded_step=loaded_iteration,
        sequence_length=seq_length,
        show_memory=report_memory_flag,
    )


def reduce_max_memory_across_pp_group(
    report: dict[str, int | float] | None = None,
    pp_group: dist.ProcessGroup | None = None,
    *,
    memory_report: dict[str, int | float] | None = None,
) -> dict[str, int | float]:
    """The largest of each value over the stages of a pipeline. Collective: one maximum, and one copy to the host.

    Args:
        report: of this rank; `memory_report` is another name of it.
        pp_group: the stages.

    Returns:
        See `mimo_train.metrics.memory_stats.largest_over`.
    """
    given = report if report is not None else memory_report
    return memory_stats.largest_over(given or {}, pp_group)
