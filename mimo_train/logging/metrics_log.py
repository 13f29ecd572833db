"""Write the numbers of a run to every sink. One process of a run owns the log.

metrics.jsonl is the record: lines that cannot be written are held back and raise an error at the end. Other sinks are
copies: one that fails is reported once and skipped, and training continues.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show the predictions of an evaluation, see `page.held_out_samples`."""

    def close(self) -> None:
        """Write what is still held back, and close."""


RECORD = "metrics.jsonl"
SINKS: dict[str, Callable[[Path, dict[str, Any], int], Sink]] = {
    RECORD: lambda run_dir, config, resumed_step: JsonlSink(run_dir / RECORD, resumed_step),
    "tensorboard": lambda run_dir, config, resumed_step: TensorboardSink(run_dir / "tensorboard", resumed_step),
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "comet": CometSink,
}
"""Opens each sink as (run_dir, config, resumed_step). `log.NAME` switches each on, except the record."""


class MetricsLog:
    """Write values to every sink. A failure of the record stops the run."""

    def __init__(self, sinks: Mapping[str, Sink] | None = None):
        """Log to `sinks` by name; none on ranks that do not log."""
        self._sinks = dict(sinks or {})
        self._failed: set[str] = set()

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write the values of a step, or of an evaluation at that step (keys `eval/...`). Raises what the record
        raises."""
        self._to_all(step, lambda sink: sink.log(step, consumed_samples, values))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Show the predictions of an evaluation at a step, with their media."""
        if samples:
            self._to_all(step, lambda sink: sink.samples(step, samples))

    def _to_all(self, step: int, write: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            if name in self._failed:
                continue
            try:
                write(sink)
            except Exception as error:
                if name == RECORD:
                    raise
                self._failed.add(name)
                _warn(name, f"failed at step {step}", error)

    def handle(self, name: str) -> Any:
        """Return the handle of a sink in `SINKS`; None if the run does not use it or it has failed."""
        return None if name in self._failed or name not in self._sinks else self._sinks[name].handle

    def close(self) -> None:
        """Close every sink, even if one raises. Raises the error of the record after all are closed."""
        first: Exception | None = None
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                if name == RECORD:
                    first = error
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
    for name, open_sink in SINKS.items():
        if name != RECORD and not getattr(cfg.log, name):
            continue
        try:
            sinks[name] = open_sink(run_dir, to_dict(cfg), resumed_step)
        except Exception as error:
            if name == RECORD:
                raise
            _warn(name, "cannot start", error)
    return MetricsLog(sinks)


def _warn(name: str, what: str, error: Exception) -> None:
    _logger.warning(
        "%s %s (%s: %s): training continues without it, metrics.jsonl has every number",
        name,
        what,
        type(error).__name__,
        error,
    )
