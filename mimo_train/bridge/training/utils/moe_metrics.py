"""A writer of Megatron-Core's metrics of mixtures of experts: TensorBoard, Comet and MLflow.

A tracker that fails is reported once and disabled, and training continues.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

_logger = logging.getLogger(__name__)


class _MoeMetricFanoutWriter:
    """Has `add_scalar` like TensorBoard's `SummaryWriter`."""

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
                _logger.warning(
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
