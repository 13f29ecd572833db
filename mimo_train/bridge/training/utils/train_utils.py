"""The helpers of a training loop, with the names and signatures of Megatron-Bridge."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule, param_is_not_shared
from torch.distributed.tensor import DTensor

from mimo_train.bridge.training.state import SessionState, session_of
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
from mimo_train.models.parameter_norms import grad_l2_norms, params_l2_norm, squares_of
from mimo_train.parallel import device
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


def reduce_max_stat_across_model_parallel_group(stat: float | None, mp_group: dist.ProcessGroup) -> float | None:
    """Return the largest of the ranks' values, the same on every rank of the group. Collective; copies to the host.

    Args:
        stat: this rank's value; None if it has none, such as the gradient norm of a rank that trains nothing.

    Returns:
        The maximum, NaN if any rank has NaN, None if no rank has a value.
    """
    is_nan = stat is not None and math.isnan(stat)
    value = -math.inf if stat is None or is_nan else stat
    # Backends differ in the maximum with NaN, so NaN and missing values are sent as flags.
    message = torch.tensor([value, stat is not None, is_nan], dtype=torch.float64, device=device.current())
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=mp_group)
    largest, number, any_nan = message.tolist()
    return (math.nan if any_nan else largest) if number else None


def logical_and_across_model_parallel_group(input: bool, mp_group: dist.ProcessGroup) -> bool:
    """Return True if `input` is true on every rank of the group. Collective; copies to the host."""
    message = torch.tensor(int(input), device=device.current())
    dist.all_reduce(message, op=dist.ReduceOp.MIN, group=mp_group)
    return bool(message.item())


def calc_params_l2_norm(
    model: MegatronModule | list[MegatronModule],
    model_config: Any,
    use_megatron_fsdp: bool = False,
    force_create_fp32_copy: bool = False,
) -> float:
    """Return the L2 norm of all parameters of all modules, frozen ones included. Collective over the world.

    Args:
        model: the model chunks of this rank.
        model_config: unused: the parameters carry the needed attributes.
        use_megatron_fsdp: all parameters are DTensors.
        force_create_fp32_copy: use 16-bit parameters themselves, in fp32, instead of their master copies.

    Raises:
        UserError: `use_megatron_fsdp`, and a parameter is not a DTensor.
    """
    chunks = model if isinstance(model, list) else [model]
    if use_megatron_fsdp:
        return calc_dtensor_params_l2_norm([param for chunk in chunks for param in chunk.parameters()])
    return params_l2_norm(chunks, master_copies=not force_create_fp32_copy)


def report_l2_norm_grad(model: MegatronModule | list[MegatronModule]) -> dict[str, float]:
    """Return the L2 norms of gradients; see `mimo_train.models.parameter_norms.grad_l2_norms`."""
    return grad_l2_norms(model if isinstance(model, list) else [model])


def calc_dtensor_params_l2_norm(params: Iterable[DTensor]) -> float:
    """Return the L2 norm of DTensors that are sharded or replicated over their device meshes. Collective over the
    meshes.

    Args:
        params: the same DTensors, in the same order, on every rank of a mesh.

    Raises:
        UserError: a parameter is not a DTensor, or holds incomplete sums (placement `Partial`).
    """
    by_spec: dict[tuple, list[torch.Tensor]] = {}
    for param in params:
        if not isinstance(param, DTensor):
            raise UserError(f"a norm over DTensors was asked for, and a parameter is a {type(param).__name__}")
        if any(placement.is_partial() for placement in param.placements):
            raise UserError(f"a norm needs cut or replicated DTensors, and one has placements {param.placements}")
        by_spec.setdefault((param.device_mesh, param.placements), []).append(param.to_local())
    total = 0.0
    for (mesh, placements), pieces in by_spec.items():
        square = squares_of(pieces).sum()
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(square, group=mesh.get_group(axis))
        total += square.item()
    return total**0.5


class _MoeMetricFanoutWriter:
    """Writes Megatron-Core's metrics of experts to TensorBoard, Comet and MLflow, by `add_scalar` like TensorBoard's
    `SummaryWriter`. A tracker that fails is reported once and left out, and training continues."""

    def __init__(self, tb_writer: Any | None, comet_logger: Any | None, mlflow_logger: Any | None):
        """Write to all targets that are not None.

        Args:
            mlflow_logger: has `log_metric(name, value, step=...)`, like the module `mlflow`; or a client with its run's
                id (`mimo_train.logging.sinks.trackers.MlflowHandle`).
        """
        self._targets: dict[str, Callable[[str, Any, int], Any]] = {}
        if tb_writer is not None:
            self._targets["tensorboard"] = tb_writer.add_scalar
        if comet_logger is not None:
            self._targets["comet"] = lambda name, value, step: comet_logger.log_metrics({name: value}, step=step)
        if mlflow_logger is not None:
            self._targets["mlflow"] = _mlflow_writer(mlflow_logger)

    @staticmethod
    def _sanitize(value: Any) -> Any:
        """Return the number of a 0-d tensor, which Comet and MLflow do not take; other values unchanged."""
        return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Write one value of one step to all targets."""
        number = self._sanitize(value)
        for target, write in list(self._targets.items()):
            try:
                write(name, number, iteration)
            except Exception as error:
                del self._targets[target]
                logger.warning(
                    "%s: %s of step %d could not be written (%s: %s); it gets no more metrics of experts",
                    target,
                    name,
                    iteration,
                    type(error).__name__,
                    error,
                )


def _mlflow_writer(logger: Any) -> Callable[[str, Any, int], Any]:
    if isinstance(logger, tuple):
        client, run_id = logger
        return lambda name, value, step: client.log_metric(run_id, name, value, step=step)
    return lambda name, value, step: logger.log_metric(name, value, step=step)


def _build_moe_metric_writer(tb_writer: Any | None, comet_logger: Any | None, mlflow_logger: Any | None) -> Any | None:
    """Return the `writer` for Megatron-Core's metric functions: `tb_writer` itself without Comet and MLflow."""
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)
