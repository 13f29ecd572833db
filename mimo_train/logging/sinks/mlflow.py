"""MLflow: at MLFLOW_TRACKING_URI, else in a database of the run's own, run.dir/mlflow/mlflow.db.

`mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow/mlflow.db` shows it. The run's id is kept in
run.dir/mlflow_id.txt, so that a resumed run goes on in the same MLflow run. MLflow cannot take back what it was told:
steps that are trained again after a crash are there twice, and the value with the later timestamp is the one that
counts. The tag `resumed_after_step` names where the run was last taken up.
"""

import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from mimo_train.logging.sinks.run_id import keep_id, kept_id

_ID_FILE = "mlflow_id.txt"
_PARAMETER_LENGTH = 6000
"""Characters that MLflow takes for a parameter."""
_IN_FLIGHT = 64
"""Steps whose values may still be on their way to the server."""


class MlflowHandle(NamedTuple):
    """What MLflow's own functions need to add to the run."""

    client: Any
    """`mlflow.tracking.MlflowClient`"""
    run_id: str


class MlflowSink:
    """One MLflow run, in the experiment MLFLOW_EXPERIMENT_NAME, or mimo-train.

    Values are sent by a thread of MLflow's, so that a slow server costs the training nothing. MLflow knows no infinity:
    it keeps the largest float instead.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start or, with `resumed_step` above 0, go on with the run of `run_dir`.

        Raises:
            mlflow.exceptions.MlflowException: the store cannot be reached or has no run of that id.
        """
        # Imported here: it takes seconds.
        from mlflow.entities import RunStatus
        from mlflow.tracking import MlflowClient

        for noisy in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        folder = run_dir.resolve() / "mlflow"
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        client = MlflowClient(tracking_uri=uri)
        run_id = kept_id(run_dir / _ID_FILE, resumed_step)
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mimo-train")
            experiment = client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else client.create_experiment(name, artifacts)
            run_id = client.create_run(number, run_name=run_dir.name).info.run_id
            keep_id(run_dir / _ID_FILE, run_id)
            for key, value in _flat(config):
                client.log_param(run_id, key, str(value)[:_PARAMETER_LENGTH])
        else:
            client.update_run(run_id, RunStatus.to_string(RunStatus.RUNNING))
            client.set_tag(run_id, "resumed_after_step", resumed_step)
        self.handle = MlflowHandle(client, run_id)
        self._in_flight: deque[Any] = deque()

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Hand over every value at `step`.

        Raises:
            mlflow.exceptions.MlflowException: values of an earlier step could not be written.
        """
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [
            Metric(key, float(value), now, step)
            for key, value in {"consumed_samples": consumed_samples, **values}.items()
        ]
        client, run_id = self.handle
        self._in_flight.append(client.log_batch(run_id, metrics, synchronous=False))
        if len(self._in_flight) > _IN_FLIGHT:
            self._in_flight.popleft().wait()

    def close(self) -> None:
        """Wait until all is written, and end the run."""
        while self._in_flight:
            self._in_flight.popleft().wait()
        self.handle.client.set_terminated(self.handle.run_id)


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The values of nested dicts by dotted key."""
    flat = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return flat
