"""What a run is while it runs: one object, handed around."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.timers import Timers

from mimo_train.config import ConfigContainer
from mimo_train.layout import RunLayout
from mimo_train.pipeline import Pipeline


@dataclass
class TrainState:
    """Where the run stands. Saved in checkpoints."""

    step: int = 0
    """Optimizer steps done."""
    consumed_train_samples: int = 0
    """Samples trained; the whole state of the data, since their order is a function of the seed."""
    skipped_iters: int = 0
    """Steps whose update was skipped because a gradient was not finite."""
    bad_samples: int = 0
    """Samples so far that could not be read."""

    def state_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what a checkpoint holds."""
        for name, value in state.items():
            setattr(self, name, int(value))


@dataclass
class GlobalState:
    """Configuration, progress, timers and loggers of a run; forward steps receive it on request."""

    cfg: ConfigContainer
    layout: RunLayout
    run_dir: Path
    kind: str
    """cuda or cpu."""
    device: torch.device
    tokenizer: Any
    train_state: TrainState = field(default_factory=TrainState)
    timers: Timers = field(default_factory=lambda: Timers(log_level=0, log_option="minmax"))
    pipeline: Pipeline | None = None
    metrics: Any = None
    """`MetricsLog` on the logging rank, else None."""
    console: Any = None
    """`Console` on the logging rank, else None."""
    start_time: float = field(default_factory=time.time)
    """When this job started, in seconds since the epoch."""

    @property
    def is_logging_rank(self) -> bool:
        """Whether this rank writes the log."""
        return self.pipeline is not None and self.pipeline.is_logging_rank
