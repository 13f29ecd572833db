"""Write the numbers of a run to every sink. One process of a run owns the log.

metrics.jsonl is the record: lines that cannot be written are held back and raise an error at the end. Other sinks are
copies: one that fails is reported once and skipped, and training continues.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mimo_train.config.compose import to_dict
from mimo_train.config.schema import ConfigContainer
from mimo_train.logging.sinks.jsonl import JsonlSink
from mimo_train.logging.sinks.trackers import CometSink, MlflowSink, TensorboardSink, WandbSink

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A destination of values."""

    handle: Any
    """Object for writing more than numbers: a path, `SummaryWriter`, W&B run, `MlflowHandle` or Comet experiment."""

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write `values` of optimizer step `step`."""

    def close(self) -> None:
        """Write what is still held back, and close."""


@dataclass(frozen=True)
class SinkKind:
    """When a sink is used and how it is opened."""

    wanted: Callable[[ConfigContainer], bool]
    open: Callable[[ConfigContainer, Path, int], Sink]
    """Called with (config, run_dir, resumed_step)."""
    required: bool = False
    """True if a failure of this sink stops the run."""


SINKS: dict[str, SinkKind] = {
    "metrics.jsonl": SinkKind(
        wanted=lambda cfg: True,
        open=lambda cfg, run_dir, resumed_step: JsonlSink(run_dir / "metrics.jsonl", resumed_step),
        required=True,
    ),
    "tensorboard": SinkKind(
        wanted=lambda cfg: cfg.log.tensorboard,
        open=lambda cfg, run_dir, resumed_step: TensorboardSink(run_dir / "tensorboard", resumed_step),
    ),
    "wandb": SinkKind(
        wanted=lambda cfg: cfg.log.wandb,
        open=lambda cfg, run_dir, resumed_step: WandbSink(run_dir, to_dict(cfg), resumed_step),
    ),
    "mlflow": SinkKind(
        wanted=lambda cfg: cfg.log.mlflow,
        open=lambda cfg, run_dir, resumed_step: MlflowSink(run_dir, to_dict(cfg), resumed_step),
    ),
    "comet": SinkKind(
        wanted=lambda cfg: cfg.log.comet,
        open=lambda cfg, run_dir, resumed_step: CometSink(run_dir, to_dict(cfg), resumed_step),
    ),
}


class MetricsLog:
    """Write values to every sink."""

    def __init__(
        self, sinks: Mapping[str, Sink] | None = None, required: frozenset[str] = frozenset({"metrics.jsonl"})
    ):
        """Log to `sinks` by name (none on ranks that do not log); a failing sink in `required` stops the run."""
        self._sinks = dict(sinks or {})
        self._required = required
        self._failed: set[str] = set()

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write the values of a step, or of an evaluation at that step (keys `eval/...`).

        Raises:
            Exception: whatever a required sink raises.
        """
        for name, sink in self._sinks.items():
            if name in self._failed:
                continue
            try:
                sink.log(step, consumed_samples, values)
            except Exception as error:
                if name in self._required:
                    raise
                self._failed.add(name)
                _warn(name, f"failed at step {step}", error)

    def sink(self, name: str) -> Sink | None:
        """Return a sink by its key in `SINKS`; None if the run does not use it or it has failed."""
        return None if name in self._failed else self._sinks.get(name)

    def handle(self, name: str) -> Any:
        """Return a sink's handle (see `Sink.handle`), or None."""
        found = self.sink(name)
        return None if found is None else found.handle

    def close(self) -> None:
        """Close every sink, even if one raises.

        Raises:
            Exception: the first error of a required sink, after all are closed.
        """
        first: Exception | None = None
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                if name in self._required:
                    first = first or error
                elif name not in self._failed:
                    _warn(name, "failed to close", error)
        self._sinks = {}
        if first is not None:
            raise first


def build_metrics_log(cfg: ConfigContainer, run_dir: Path, *, resumed_step: int) -> MetricsLog:
    """Open the sinks in `cfg.log`. Call it on one rank only.

    Args:
        run_dir: folder of the run, created if missing.
        resumed_step: optimizer steps already done, 0 for a new run; values of later steps are dropped.

    Raises:
        OSError, UserError: metrics.jsonl cannot be written or continued.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks: dict[str, Sink] = {}
    for name, kind in SINKS.items():
        if not kind.wanted(cfg):
            continue
        try:
            sinks[name] = kind.open(cfg, run_dir, resumed_step)
        except Exception as error:
            if kind.required:
                raise
            _warn(name, "cannot start", error)
    return MetricsLog(sinks, frozenset(name for name, kind in SINKS.items() if kind.required))


def _warn(name: str, what: str, error: Exception) -> None:
    _logger.warning(
        "%s %s (%s: %s): training continues without it, metrics.jsonl has every number",
        name,
        what,
        type(error).__name__,
        error,
    )
