"""What a step writes into the log: `training_log` gathers every step and writes at logging steps."""

import time
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from data.pipeline import require_budget
from mimo_train.config.schema import ConfigContainer
from mimo_train.diagnose.straggler import StragglerTimer
from mimo_train.metrics.memory_stats import reduce_max_memory_across_pp_group
from mimo_train.metrics.runtime import report_runtime, report_throughput
from mimo_train.metrics.stopwatch import INTERVALS, time_split
from mimo_train.metrics.utilisation import peak_tflops, utilisation
from mimo_train.model.norms import calc_params_l2_norm, report_l2_norm_grad
from mimo_train.plan.flops import StepFlops
from mimo_train.plan.memory import padded_vocab_size
from mimo_train.step.state import GlobalState
from mimo_train.training.interval import Interval, IntervalNumbers

_STEPS = "advanced iterations"
"""Key of `training_log`'s sums for the steps whose update was made."""


class StepLog:
    """The log of a loop: what a step hands in, and what is kept between logging steps.

    Attributes:
        flops: model FLOPs of all modules since the last logging step.
        stragglers: takes the compute times of the ranks; None unless `log.straggler`.
    """

    def __init__(self, state: GlobalState, model: list[MegatronModule], optimizer: Any, scheduler: Any):
        self._state, self._model, self._optimizer, self._scheduler = state, model, optimizer, scheduler
        self._step_flops = StepFlops(state.cfg, padded_vocab_size(state.tokenizer.vocab_size))
        self._totals: dict[str, Any] = {}
        self._report_memory = state.cfg.log.memory
        self._history: list[float] = []
        self._loaded_step = state.train_state.step
        self._started = 0.0
        self._rates: dict[str, float] = {}
        self.flops = 0.0
        self.stragglers = StragglerTimer(state.layout, state.console) if state.cfg.log.straggler else None
        state.interval = Interval(state, self.stragglers)

    def start_step(self) -> None:
        """Start the clock of a step, and note the learning rates it runs with."""
        self._started = time.perf_counter()
        self._rates = self._scheduler.learning_rates()

    def end_step(
        self,
        losses: dict[str, torch.Tensor],
        skipped: int,
        grad_norm: float | None,
        num_zeros: int | None,
        data_iterator: Any,
    ) -> None:
        """Count the step that has just ended, and write what is due."""
        state, progress, log = self._state, self._state.train_state, self._state.cfg.log
        self._history.append(time.perf_counter() - self._started)
        del self._history[: -log.throughput_window - 1]
        batch = data_iterator.current
        state.interval.note_step(
            self._step_flops(
                samples=batch.size, counts=batch.token_counts, loads=batch.loads, pairs=batch.pairs, step=progress.step
            ),
            batch.size,
            self._history[-1],
        )
        self.flops = state.interval.model_flops
        due = is_logging_step(state.cfg, progress.step)
        self._report_memory = training_log(
            losses,
            self._totals,
            self._rates,
            None,
            float(self._optimizer.get_loss_scale()) if state.cfg.train.precision == "fp16" and due else 1.0,
            self._report_memory,
            skipped,
            grad_norm,
            calc_params_l2_norm(self._model, None) if due and log.params_norm else None,
            num_zeros,
            state.cfg,
            state,
            self._history,
            self._model,
            loaded_iteration=self._loaded_step,
        )


def is_logging_step(cfg: ConfigContainer, step: int) -> bool:
    """Whether the log is written after `step`: every `train.log_interval` steps, and after the last one."""
    return step % cfg.train.log_interval == 0 or step == cfg.train.iters


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
    global_state: GlobalState,
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
        total_loss_dict: sums since the last logging step; starts empty, changed in place.
        learning_rate: of the step; by module for several.
        decoupled_learning_rate: that of embeddings and output layer, if they have one.
        loss_scale: logged if it is not 1.
        report_memory_flag: whether the next logging step prints the memory on the console.
        skipped_iter: 1 if the update was skipped, whose losses then do not count.
        grad_norm: over all modules before clipping; None if the update was skipped.
        params_norm: of all parameters.
        num_zeros_in_grad: gradient elements that are zero.
        history_wct: seconds of the latest steps, newest last.
        model: the model chunks of this rank, for `log.grad_norms`.
        pg_collection: reduce memory over this `pp` group instead of over all ranks.
        log_max_attention_logit: largest attention logit, if it is tracked.
        loaded_iteration: step that this job started from.
        seq_length: tokens of a sample; default `data.sequence_length`.

    Returns:
        The new `report_memory_flag`: False once memory has been printed.

    Raises:
        TooManyBadSamples: more samples were bad than `data.max_bad_samples` allows. Every rank counts the same samples,
            so every rank raises it at the same step.
    """
    state, step = global_state, global_state.train_state.step
    if not skipped_iter:
        for name, value in loss_dict.items():
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + value
        total_loss_dict[_STEPS] = total_loss_dict.get(_STEPS, 0) + 1
    if not is_logging_step(config, step):
        return report_memory_flag
    steps = max(total_loss_dict.pop(_STEPS, 0), 1)
    numbers = state.interval.collect({name: total / steps for name, total in total_loss_dict.items()})
    total_loss_dict.clear()
    state.train_state.bad_samples += numbers.bad_samples
    require_budget(state.train_state.bad_samples, config.data.max_bad_samples, state.interval.bad_sample)
    layer_norms = report_l2_norm_grad(model) if config.log.grad_norms else {}
    memory = numbers.memory
    if pg_collection is not None:
        memory = reduce_max_memory_across_pp_group(memory, pg_collection.pp)
    if not state.is_logging_rank:
        return report_memory_flag
    rates = learning_rate if isinstance(learning_rate, dict) else {"all": learning_rate}
    optional = {
        "learning_rate/decoupled": decoupled_learning_rate,
        "loss_scale": loss_scale if loss_scale != 1 else None,
        "params_norm": params_norm,
        "num_zeros": num_zeros_in_grad,
        "max_attention_logit": log_max_attention_logit,
        "bad_samples": state.train_state.bad_samples or None,
        "skipped_iters": state.train_state.skipped_iters or None,
    }
    values = dict(numbers.losses)
    values["grad_norm"] = float("nan") if grad_norm is None else grad_norm
    values |= {f"learning_rate/{name}": rate for name, rate in rates.items() if rate is not None}
    values |= {name: float(value) for name, value in optional.items() if value is not None}
    seq_length = seq_length or config.data.sequence_length
    values |= _speed(state, numbers, seq_length, history_wct, loaded_iteration)
    values |= layer_norms | memory
    state.metrics.log(step, state.train_state.consumed_train_samples, values)
    state.console.step(step, values)
    if report_memory_flag and memory:
        state.console.message("memory: " + "  ".join(f"{name} {value:.3g}" for name, value in memory.items()))
        report_memory_flag = False
    state.callbacks.fire("on_log", state, values)
    return report_memory_flag


def _speed(
    state: GlobalState, numbers: IntervalNumbers, seq_length: int, history_wct: list[float], loaded_step: int
) -> dict[str, float]:
    """Throughput, FLOPs and where the time went, in seconds per step."""
    cfg, log, progress = state.cfg, state.cfg.log, state.train_state
    values = {
        "tokens_per_second": numbers.samples * seq_length / numbers.seconds,
        "step_seconds": numbers.seconds / numbers.steps,
    }
    name = torch.cuda.get_device_name(state.device) if state.kind == "cuda" else ""
    flops = {module: total * (1 / numbers.steps) for module, total in numbers.flops.items()}
    values |= utilisation(flops, values["step_seconds"], state.layout, log.peak_tflops or peak_tflops(name))
    if log.module_times:
        values |= time_split(numbers.times, state.layout, {module: total.hardware for module, total in flops.items()})
    if state.interval.stragglers is not None:
        compute = INTERVALS.index("forward_backward")
        values |= state.interval.stragglers.observe(
            {rank: row[compute] * numbers.steps for rank, row in enumerate(numbers.times)}
        )
    if log.throughput_window:
        values |= report_throughput(
            cfg.train,
            progress.step - loaded_step,
            seq_length,
            history_wct,
            log.throughput_window,
            history_samples=list(state.interval.step_samples),
        )
    if log.runtime_unit:
        values |= report_runtime(
            progress, state.start_time, seq_length, cfg.train.iters, log.runtime_unit, loaded_iteration=loaded_step
        )
    return values
