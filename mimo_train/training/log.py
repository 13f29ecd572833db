"""The log of training steps: gathered at every step, written to sinks and console at logging steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.timers import Timers

from data.text_format import plural
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.flops import StepFlops
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.layout.kernels import has_fp8
from mimo_train.logging.runtime import report_runtime, report_throughput
from mimo_train.logging.stopwatch import INTERVALS, Busiest, StragglerTimer, time_split
from mimo_train.logging.throughput import imbalance, peak_tflops, utilisation
from mimo_train.models.layers import attends_unfused
from mimo_train.models.parameter_norms import grad_l2_norms, params_l2_norm
from mimo_train.parallel import device as devices
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.interval import (
    NAN,
    Interval,
    IntervalNumbers,
    add_step,
    sums_on_device,
    sums_on_host,
    take_means,
    taken_name,
)
from mimo_train.training.setup import Session
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.state import StepResult

_UNFUSED = (
    "attention: Transformer Engine has no fused kernel for it here and keeps all scores, which costs time and memory: "
    "install flash-attn; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints the reason"
)


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a logging step besides those of its interval; None values are omitted."""

    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of the step by module, and by NAME.projector if the projector has its own."""
    grad_norm: float | None = None
    """Over all modules before clipping; None is written as NaN."""
    loss_scale: float = 1.0
    """Written if it is not 1."""
    params_norm: float | None = None
    num_zeros_in_grad: int | None = None
    max_attention_logit: float | None = None

    def values(self) -> dict[str, float]:
        """Return the numbers by their names in the log."""
        values = {"grad_norm": float("nan") if self.grad_norm is None else float(self.grad_norm)}
        values |= {f"learning_rate/{name}": float(rate) for name, rate in self.learning_rates.items()}
        optional = {
            "loss_scale": self.loss_scale if self.loss_scale != 1 else None,
            "params_norm": self.params_norm,
            "num_zeros": self.num_zeros_in_grad,
            "max_attention_logit": self.max_attention_logit,
        }
        return values | {name: float(value) for name, value in optional.items() if value is not None}


class StepLog:
    """The log of a loop, with the state it keeps between logging steps. Every rank calls it after every step.

    Between logging steps nothing leaves the device. A logging step costs one sum over the world and one copy to the
    host, plus those of `params_norm` and `grad_norms` in `log.metrics`. `stragglers` is None unless `log.metrics` has
    it.
    """

    def __init__(self, session: Session, callbacks: Callbacks):
        self._state, parts = session.state, session.parts
        self._pipeline, self._optimizer, self._schedulers = parts.pipeline, session.optimizer, session.schedulers
        self._counts, self._callbacks = session.counts, callbacks
        self._step_flops = StepFlops(self._state.cfg, embedding_rows(self._state.cfg.llm, parts.tokenizer.vocab_size))
        self._interval = Interval(self._state, parts.stopwatch, parts.pipeline.device, session.counts)
        self._dataset = getattr(session.data, "dataset", None)  # a user's own iterator may have none
        self._totals: dict[str, Any] = {}
        self._shows_memory = True
        self._history: list[float] = []
        self._loaded_step, self._empty_said = self._state.train_state.step, self._state.train_state.empty_steps
        self._started, self._last = 0.0, StepResult()
        self._rates: dict[str, float] = {}
        self._imbalance: dict[str, float] = {}
        self._busiest = Busiest(self._state.layout)
        straggler = "straggler" in self._state.cfg.log.metrics
        self.stragglers = StragglerTimer(self._state.layout, self._state.console) if straggler else None
        session.checkpointer.note_sums(self)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the sums since the last line, for a checkpoint; None after a line and on ranks that do not log."""
        if not self._interval.steps or not self._state.is_logging_rank:
            return None
        return {
            "interval": self._interval.state_dict(),
            "totals": sums_on_host(self._totals),
            "last": {"grad_norm": self._last.grad_norm, "num_zeros_in_grad": self._last.num_zeros_in_grad},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sums of a checkpoint, as if the run had never stopped."""
        self._interval.load_state_dict(state["interval"])
        self._totals = sums_on_device(state["totals"], self._pipeline.device)
        self._last = StepResult(**state["last"])

    def continue_sums(self, totals: dict[str, Any]) -> None:
        """Continue a loaded checkpoint's sums in the caller's `totals`, which checkpoints hold from now on."""
        if not totals:
            totals |= self._totals
        self._totals = totals

    def start_step(self) -> None:
        """Start the clock of a step, and record its learning rates."""
        self._started = time.perf_counter()
        self._rates = self._schedulers.learning_rates()

    def end_step(self, result: StepResult, data: StepIterator) -> None:
        """Record the step that just ended; write the log at logging steps, and raise as `write` does. A step of
        `train.skip_iters` only counts its bad samples."""
        is_empty = self._counts.note(data, result.tokens)
        if result.tokens is not None:
            if not self._history and self._state.cfg.train.precision != "fp32" and attends_unfused():
                self._state.console.message(_UNFUSED)
            self._history.append(time.perf_counter() - self._started)
            del self._history[: -self._state.cfg.log.throughput_window - 1]
            self.note(data, self._history[-1], result)
            add_step(self._totals, result.losses, result.skipped_iter, is_empty, result.of_sources)
            self._last = result
        # A log that was due at a skipped step is written with the last step that was made.
        cfg, result = self._state.cfg, self._last
        if not (self._interval.steps and is_logging_step(cfg, self._state.train_state.step, self._state.last_step)):
            return
        model = self._pipeline.model
        numbers = StepNumbers(
            self._rates,
            result.grad_norm,
            float(self._optimizer.get_loss_scale()) if cfg.train.precision == "fp16" else 1.0,
            params_l2_norm(model) if "params_norm" in cfg.log.metrics else None,
            result.num_zeros_in_grad,
        )
        self._shows_memory = self.write(self._totals, numbers, self._history, show_memory=self._shows_memory)
        if self.stragglers is not None:
            self.stragglers.report()

    def note(self, data: StepIterator, seconds: float, result: StepResult) -> None:
        """Record the current step of `data`, which took `seconds` on this rank."""
        batch, step = data.current, self._state.train_state.step
        flops = self._step_flops(
            texts=batch.plan.texts_of_length,
            counts=batch.token_counts,
            loads=batch.loads,
            pairs=batch.pairs,
            step=step,
        )
        self._interval.note_step(flops, batch.plan, seconds, result.logits, self._step_flops.of_logit(step))
        if is_logging_step(self._state.cfg, step, self._state.last_step):
            self._imbalance = imbalance(
                batch,
                self._state.layout,
                lambda texts: self._step_flops.of_texts(texts, step).hardware,
                self._pipeline.shapes.routes,
            )

    def write(
        self,
        totals: dict[str, Any],
        step_numbers: StepNumbers,
        history: Sequence[float],
        *,
        sequence_length: int | None = None,
        show_memory: bool = False,
    ) -> bool:
        """Write a logging step to the sinks and the console. Collective over all ranks.

        Args:
            totals: see `add_step`; reset to zero.
            history: seconds of the latest steps, newest last.
            sequence_length: tokens of a sample; default: the samples' own number.
            show_memory: print the memory on the console.

        Returns:
            The new `show_memory`: False once memory has been printed.

        Raises:
            TooManyBadSamples: more bad samples than `data.max_bad_samples`; on every rank at the same step.
            UserError: more empty steps than `train.max_empty_steps`, on every rank at the same step; or a loss has the
                name of another number, on the logging rank.
        """
        state, cfg = self._state, self._state.cfg
        numbers = self._interval.collect(take_means(totals))
        empty, self._empty_said = state.train_state.empty_steps - self._empty_said, state.train_state.empty_steps
        if empty:
            state.console.message(
                f"step {state.train_state.step}: {empty} of the last {plural(numbers.steps, 'step')} had no token with "
                "loss"
            )
        self._counts.require_budget()
        layer_norms = grad_l2_norms(self._pipeline.model) if "grad_norms" in cfg.log.metrics else {}
        if not state.is_logging_rank:
            return show_memory
        losses = dict(numbers.losses)
        nan_steps, values = losses.pop(NAN, 0.0), step_numbers.values()
        so_far = {name: getattr(state.train_state, name) for name in ("bad_samples", "empty_steps", "skipped_iters")}
        values |= {name: float(count) for name, count in (so_far | {"nan_iters": nan_steps}).items() if count}
        values |= self._speed(numbers, sequence_length, history)
        values |= layer_norms | numbers.memory | self._mixture() | timer_seconds(state.timers, numbers.steps)
        if names := sorted(losses.keys() & values.keys()):
            raise taken_name(names[0])
        values, step = losses | values, state.train_state.step
        state.metrics.log(step, state.train_state.consumed_train_samples, values)
        state.console.step(step, values, self._busiest.name(numbers.times), losses)
        if show_memory and numbers.memory:
            state.console.message(
                "memory: " + "  ".join(f"{name} {value:.3g}" for name, value in numbers.memory.items())
            )
        self._callbacks.fire("on_log", state, values)
        return show_memory and not numbers.memory

    def _mixture(self) -> dict[str, float]:
        """Return the samples of a mixture's sources so far, and their epochs."""
        data = self._dataset
        if data is None or len(data.sources) < 2:
            return {}
        counts = data.order.counts(self._state.train_state.consumed_train_samples)
        values = {}
        for source, count, size in zip(data.sources, counts, data.order.sizes, strict=True):
            values[f"samples/{source.name}"], values[f"epochs/{source.name}"] = float(count), count / size
        return values

    def _speed(
        self, numbers: IntervalNumbers, sequence_length: int | None, history: Sequence[float]
    ) -> dict[str, float]:
        state, log, progress = self._state, self._state.cfg.log, self._state.train_state
        tokens = numbers.tokens if sequence_length is None else numbers.samples * sequence_length
        values = {"tokens_per_second": tokens / numbers.seconds, "step_seconds": numbers.seconds / numbers.steps}
        if numbers.tokens < numbers.positions:
            values["padding"] = 1 - numbers.tokens / numbers.positions
        values |= self._imbalance
        flops = {module: total * (1 / numbers.steps) for module, total in numbers.flops.items()}
        device, precisions = devices.name(self._pipeline.device), dict.fromkeys(has_fp8(state.cfg), "fp8")
        peaks = {
            module: log.peak_tflops or peak_tflops(device, precisions.get(module, state.cfg.train.precision))
            for module in state.cfg.modules
        }
        values |= utilisation(flops, values["step_seconds"], state.layout, peaks)
        work = {module: total.hardware for module, total in flops.items()}
        values |= time_split(numbers.times, state.layout, work)
        if self.stragglers is not None:
            compute = INTERVALS.index("forward_backward")
            seconds = {rank: row[compute] * numbers.steps for rank, row in enumerate(numbers.times)}
            values |= self.stragglers.observe(
                seconds, numbers.steps, sum(flops.model for flops in numbers.flops.values())
            )
        if log.throughput_window:
            values |= report_throughput(
                state.cfg.train,
                progress.step - self._loaded_step,
                sequence_length or state.cfg.data.sequence_length,
                history,
                log.throughput_window,
                history_samples=list(self._interval.step_samples),
                history_tokens=list(self._interval.step_tokens) if sequence_length is None else None,
            )
        if log.runtime_unit:
            values |= report_runtime(
                progress,
                time.time() - state.job_seconds,
                sequence_length or state.cfg.data.sequence_length,
                state.last_step,
                log.runtime_unit,
                loaded_iteration=self._loaded_step,
                tokens=progress.consumed_train_tokens if sequence_length is None else None,
            )
        return values


def timer_seconds(timers: Timers, steps: int) -> dict[str, float]:
    """Return seconds per step of the timers that ran in the last `steps` steps, as `timers/NAME`; resets them."""
    seconds = {f"timers/{name}": timer.elapsed(reset=True) / steps for name, timer in timers._timers.items()}
    return {name: value for name, value in seconds.items() if value > 0}


def is_logging_step(cfg: ConfigContainer, step: int, last_step: int) -> bool:
    """True if the log is written after `step`: every `train.log_interval` steps, and after the last one."""
    return step % cfg.train.log_interval == 0 or step == last_step
