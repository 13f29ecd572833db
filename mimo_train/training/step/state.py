"""The state of a run for forward steps, callbacks and the log: config, progress, loggers, and the result of a step."""

import math
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.timers import Timers
from megatron.core.utils import StragglerDetector

from encoders.key_rules import FixedKeys
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import Run
from mimo_train.logging.console import Console
from mimo_train.logging.metrics_log import MetricsLog
from mimo_train.training.tasks.base import Task
from mimo_train.training.tasks.registry import task_of


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step before they are logged, and the actions it asks for."""

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Reduced losses by name, on ranks of the language model's last stage; reading one waits for the device."""
    of_sources: dict[str, torch.Tensor] = field(default_factory=dict)
    """[sum, count] of the losses of a mixture's sources by `loss/NAME`, and of values that a step may lack."""
    tokens: torch.Tensor | None = None
    """Tokens with loss, over all ranks, 0-d on the device; None if the step was not made."""
    logits: torch.Tensor | None = None
    """With `train.logits=learned`: positions that got logits, over all ranks, [1] on the device."""
    skipped_iter: int = 0
    """1 if the update was skipped, else 0."""
    grad_norm: float | None = None
    """Gradient norm over all modules before clipping; None if the step asks to exit or was skipped by
    `train.skip_iters`. If it is not finite, the update was skipped for that reason."""
    num_zeros_in_grad: int | None = None
    """Gradient elements that are zero; None unless they are counted."""
    should_checkpoint: bool = False
    """True if the step asks for a checkpoint."""
    should_exit: bool = False
    """True if the step asks to end the run."""
    exit_code: int = 0
    """Exit code, if the step asks to end the run."""


@dataclass
class TrainState(FixedKeys):
    """The progress of a run, saved in checkpoints. Other attributes cannot be set."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples consumed. Their order is a function of the seed, so this is the whole state of the data."""
    consumed_train_tokens: int = 0
    """Tokens of the consumed samples; without padding if `data.pad` counts it."""
    skipped_train_samples: int = 0
    """Samples skipped by `train.skip_iters`, included in the consumed ones."""
    skipped_iters: int = 0
    """Steps whose update was skipped because a gradient was not finite."""
    bad_samples: int = 0
    """Samples that could not be read, each counted once."""
    bad_rows: list[int] = field(default_factory=list)
    """Their rows over all shards."""
    empty_steps: int = 0
    """Steps in which no token had a loss."""
    floating_point_operations_so_far: float = 0.0
    """Model FLOPs of all modules."""
    scores: dict[str, list[list[float]]] = field(default_factory=dict)
    """[step, value] of each evaluation, of the metrics that `checkpoint.keep_best` and `train.stop_early` watch."""
    start_weights: int = 0
    """Fingerprint of the weights that the run started from, if its task compares with them."""

    def count(self, samples: int, tokens: int, result: StepResult, passed_over: bool = False) -> None:
        """Count a step of `samples` samples and `tokens` tokens; `passed_over` if `train.skip_iters` has it."""
        self.step += 1
        self.consumed_train_samples += samples
        self.consumed_train_tokens += tokens
        self.skipped_train_samples += samples if passed_over else 0
        self.skipped_iters += result.skipped_iter

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes as plain numbers, lists and a dict of lists."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's state; raises TypeError for a wrong value, AttributeError for an unknown name."""
        for name, value in state.items():
            if name == "scores":
                _require_scores(value)
                self.scores = value
                continue
            kind = type(getattr(self, name))
            types = (int, float) if kind is float else (int,)
            numbers = value if kind is list else [value]
            if not isinstance(numbers, list) or any(
                type(each) not in types or not 0 <= each < math.inf for each in numbers
            ):
                raise TypeError(f"{name} is {value!r}")
            setattr(self, name, kind(value))


def _require_scores(value: Any) -> None:
    """Raise TypeError if a checkpoint's value is not `TrainState.scores`."""
    lists: list[Any] = list(value.values()) if isinstance(value, dict) else [None]
    entries: list[Any] = [entry for scores in lists for entry in (scores if isinstance(scores, list) else [None])]
    for entry in entries:
        is_pair = isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and entry[0] >= 0
        if not is_pair or type(entry[1]) not in (int, float):
            raise TypeError(f"scores has {entry!r}")


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
    """Start of this job, in seconds since the epoch."""
    metrics: MetricsLog = field(default_factory=MetricsLog)
    console: Console = field(default_factory=Console.silent)
    data_ends: int | None = None
    """The step after which the data ends the run (`data.exhausted`), if before `train.iters`. Learning rates still
    follow `train.iters`."""
    stopped_early: int | None = None
    """The step after which `train.stop_early` ended the run."""
    _began: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._began = time.monotonic() - (time.time() - self.start_time)

    @property
    def job_seconds(self) -> float:
        """Seconds since this job started, unaffected by changes of the clock."""
        return time.monotonic() - self._began

    @property
    def cfg(self) -> ConfigContainer:
        """The run's config."""
        return self.run.cfg

    @cached_property
    def task(self) -> Task:
        """What the run learns, `train.task`."""
        return task_of(self.cfg)

    @property
    def last_step(self) -> int:
        """The step that ends the run."""
        ends = (self.cfg.train.iters, self.data_ends, self.stopped_early)
        return min(step for step in ends if step is not None)

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
        """TensorBoard's `SummaryWriter` if one is open on this rank, else None."""
        return self.metrics.handle("tensorboard")

    @property
    def wandb_logger(self) -> Any:
        """The Weights & Biases run if one is open on this rank, else None."""
        return self.metrics.handle("wandb")

    @property
    def mlflow_logger(self) -> Any:
        """MLflow's client and run if they are open on this rank, else None."""
        return self.metrics.handle("mlflow")

    @property
    def comet_logger(self) -> Any:
        """Comet's experiment if one is open on this rank, else None."""
        return self.metrics.handle("comet")
