"""What a run is while it runs: one object, handed around."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.timers import Timers

from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.layout import RunLayout, plan
from mimo_train.step.callbacks import Callbacks
from mimo_train.step.exit import ExitSignal
from mimo_train.step.schedule import Pipeline


@dataclass
class TrainState:
    """Where the run stands. Saved in checkpoints."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples passed; the whole state of the data, since their order is a function of the seed."""
    skipped_train_samples: int = 0
    """Of these, samples of `train.skip_iters`."""
    consumed_valid_samples: int = 0
    """Held-out samples evaluated."""
    skipped_iters: int = 0
    """Steps whose update was skipped because a gradient was not finite."""
    bad_samples: int = 0
    """Samples so far that could not be read."""
    floating_point_operations_so_far: float = 0.0
    """Model FLOPs of all modules."""

    def state_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what a checkpoint holds."""
        for name, value in state.items():
            setattr(self, name, type(getattr(self, name))(value))


@dataclass
class GlobalState:
    """Configuration, progress, timers and loggers of a run; forward steps receive it on request.

    Made from a config alone; `setup` fills in the rest.
    """

    cfg: ConfigContainer
    train_state: TrainState = field(default_factory=TrainState)
    callbacks: Callbacks = field(default_factory=Callbacks)
    exit_signal: ExitSignal = field(default_factory=ExitSignal)
    start_time: float = field(default_factory=time.time)
    """When this job started, in seconds since the epoch."""
    timers: Timers = field(default_factory=lambda: Timers(log_level=0, log_option="minmax"))
    kind: str = ""
    """cuda or cpu."""
    device: torch.device | None = None
    tokenizer: Any = None
    pipeline: Pipeline | None = None
    losses: Any = None
    """`StepLosses` of the current step."""
    pre_wrap_hook: Any = None
    """Called with the model chunks before they are wrapped for data parallelism; gives those to be used."""
    freeze_stages: Any = None
    """`FreezeStages`: holds parameters back until their step."""
    rerun: Any = None
    """`Rerun`: repeats a step whose loss is suspect."""
    stopwatch: Any = None
    """`Stopwatch` of this rank."""
    interval: Any = None
    """`Interval`: numbers since the last logging step."""
    profiler: Any = None
    """`StepProfiler` of this rank."""
    metrics: Any = None
    """`MetricsLog` on the logging rank, else None."""
    console: Any = None
    """`Console` on the logging rank, else None."""
    layout: RunLayout = field(init=False)
    run_dir: Path = field(init=False)

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: modules, layout or batch are impossible.
        """
        self.layout, self.run_dir = plan(self.cfg), Path(self.cfg.run.dir)

    @property
    def is_logging_rank(self) -> bool:
        """Whether this rank writes the log."""
        return self.pipeline is not None and self.pipeline.is_logging_rank

    @property
    def tensorboard_logger(self) -> Any:
        """TensorBoard's `SummaryWriter`, where one is open on this rank, else None."""
        return self._handle("tensorboard")

    @property
    def wandb_logger(self) -> Any:
        """The Weights & Biases run, where one is open on this rank, else None."""
        return self._handle("wandb")

    @property
    def mlflow_logger(self) -> Any:
        """MLflow's client and run, where they are open on this rank, else None."""
        return self._handle("mlflow")

    @property
    def comet_logger(self) -> Any:
        """Comet's experiment, where one is open on this rank, else None."""
        return self._handle("comet")

    def _handle(self, sink: str) -> Any:
        found = self.metrics.sink(sink) if self.metrics is not None else None
        return None if found is None else found.handle
