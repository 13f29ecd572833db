"""The state of a run for forward steps, callbacks and the log: config, progress, loggers, and the result of a step."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.timers import Timers
from megatron.core.utils import StragglerDetector

from encoders.ranges import FixedKeys
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import Run
from mimo_train.logging.console import Console
from mimo_train.logging.metrics_log import MetricsLog


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, before it is logged, and the actions it asks for."""

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Reduced losses by name, on ranks of the language model's last stage, else empty. They are on the device:
    reading one waits for it."""
    of_sources: dict[str, torch.Tensor] = field(default_factory=dict)
    """[sum, number of tokens] of the losses of a mixture's sources by `loss/NAME`, on the same ranks and device."""
    tokens: torch.Tensor | None = None
    """Tokens with loss, over all ranks, 0-d on the device; None if the step was not made."""
    logits: torch.Tensor | None = None
    """With `train.logits=learned`: positions that got logits, over all ranks, [1] on the device."""
    skipped_iter: int = 0
    """1 if the update was skipped, else 0."""
    grad_norm: float | None = None
    """Gradient norm over all modules before clipping; not finite if that is why the update was skipped. None if the
    step asks to exit, or was left out (`train.skip_iters`)."""
    num_zeros_in_grad: int | None = None
    """Number of gradient elements that are zero; None unless they are counted."""
    should_checkpoint: bool = False
    """True if the step asks for a checkpoint."""
    should_exit: bool = False
    """True if the step asks to end the run."""
    exit_code: int = 0
    """Exit code, if the step asks to end the run."""


@dataclass
class TrainState(FixedKeys):
    """The progress of a run. Saved in checkpoints. It has no other attributes."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples consumed; the whole state of the data, since their order is a function of the seed."""
    consumed_train_tokens: int = 0
    """Tokens of the consumed samples, without padding where `data.pad` knows their number."""
    skipped_train_samples: int = 0
    """Samples of `train.skip_iters` among them."""
    skipped_iters: int = 0
    """Steps whose update was skipped because a gradient was not finite."""
    bad_samples: int = 0
    """Samples so far that could not be read, each once."""
    bad_rows: list[int] = field(default_factory=list)
    """Their rows over all shards."""
    empty_steps: int = 0
    """Steps so far in which no token had a loss."""
    floating_point_operations_so_far: float = 0.0
    """Model FLOPs of all modules."""

    def count(self, samples: int, tokens: int, result: StepResult, passed_over: bool = False) -> None:
        """Count a step of `samples` samples of together `tokens` tokens; `passed_over`: it is one of
        `train.skip_iters`."""
        self.step += 1
        self.consumed_train_samples += samples
        self.consumed_train_tokens += tokens
        self.skipped_train_samples += samples if passed_over else 0
        self.skipped_iters += result.skipped_iter

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and a list of such."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint.

        Raises:
            TypeError: a value is no such number or list.
            AttributeError: there is no such state.
        """
        for name, value in state.items():
            kind = type(getattr(self, name))
            types = (int, float) if kind is float else (int,)
            numbers = value if kind is list else [value]
            if not isinstance(numbers, list) or any(
                type(each) not in types or not 0 <= each < math.inf for each in numbers
            ):
                raise TypeError(f"{name} is {value!r}")
            setattr(self, name, kind(value))


@dataclass
class GlobalState:
    """Configuration, progress, timers and loggers of a run; forward steps receive it on request.

    Console and metrics write nothing on ranks that do not log.
    """

    run: Run = field(repr=False)
    train_state: TrainState = field(default_factory=TrainState)
    timers: Timers = field(default_factory=lambda: Timers(log_level=2, log_option="minmax"))
    """Megatron-Core's timers, at every log level. Those of the logging rank are logged as `timers/NAME`."""
    start_time: float = field(default_factory=time.time)
    """When this job started, in seconds since the epoch."""
    metrics: MetricsLog = field(default_factory=MetricsLog)
    console: Console = field(default_factory=Console.silent)
    data_ends: int | None = None
    """The step after which the data ends the run (`data.exhausted`), if that is before `train.iters`, by which learning
    rates go on being computed."""
    _began: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic() - (time.time() - self.start_time)

    @property
    def job_seconds(self) -> float:
        """Seconds since this job started; whether or not the clock has been set meanwhile."""
        return time.monotonic() - self._began

    @property
    def cfg(self) -> ConfigContainer:
        """The run's config."""
        return self.run.cfg

    @property
    def last_step(self) -> int:
        """The step that ends the run."""
        return self.cfg.train.iters if self.data_ends is None else self.data_ends

    @property
    def layout(self) -> RunLayout:
        """The run's layout."""
        return self.run.layout

    @property
    def run_dir(self) -> Path:
        """Folder that the run writes into."""
        return self.run.dir

    @property
    def is_logging_rank(self) -> bool:
        """True if this rank writes the log."""
        return dist.is_initialized() and dist.get_rank() == self.layout.logging_rank

    @property
    def straggler_timer(self) -> Any:
        """A context manager for ported forward steps. It measures nothing: the log times every step itself."""
        return StragglerDetector()

    @property
    def tensorboard_logger(self) -> Any:
        """TensorBoard's `SummaryWriter`, where one is open on this rank, else None."""
        return self.metrics.handle("tensorboard")

    @property
    def wandb_logger(self) -> Any:
        """The Weights & Biases run, where one is open on this rank, else None."""
        return self.metrics.handle("wandb")

    @property
    def mlflow_logger(self) -> Any:
        """MLflow's client and run, where they are open on this rank, else None."""
        return self.metrics.handle("mlflow")

    @property
    def comet_logger(self) -> Any:
        """Comet's experiment, where one is open on this rank, else None."""
        return self.metrics.handle("comet")
