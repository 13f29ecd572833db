"""Sinks for tracking libraries: TensorBoard, Weights & Biases, MLflow and Comet.

Each library is imported only by a run that uses it. The tracker's run id is kept in run.dir, so that a resumed run
continues the same curves. Trackers cannot delete values: steps repeated after a crash appear twice at the same x, and
the later value counts.
"""

import base64
import io
import logging
import netrc
import os
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from mimo_train.config.compose import leaves


def kept_id(file: Path, resumed_step: int) -> str | None:
    """Return the id in `file` if the run resumes after `resumed_step`; None for a new run."""
    return file.read_text().strip() if resumed_step > 0 and file.exists() else None


def keep_id(file: Path, run_id: str) -> str:
    """Write `run_id` to `file` and return it."""
    file.write_text(run_id + "\n")
    return run_id


_WORDS = ("question", "answer", "truth", "correct")
"""Texts of a sample in trackers."""


def _markdown(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of samples as a table."""
    rows = [["sample", *_WORDS], ["---"] * (1 + len(_WORDS))]
    rows += [[str(number), *(_cell(sample[word]) for word in _WORDS)] for number, sample in enumerate(samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _opened(png: str) -> Any:
    """Return the image of a PNG in base64."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(png)))


class TensorboardSink:
    """TensorBoard events in run.dir/tensorboard: one scalar per key, as 32-bit floats."""

    def __init__(self, folder: Path, resumed_step: int):
        """Write into `folder`; TensorBoard hides what an earlier job wrote there after `resumed_step`."""
        # Imported here because it imports torch.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resumed_step + 1 if resumed_step > 0 else 0
        self.handle = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=15)

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write every value at `step`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all keys: one per key costs as much each.
        scalars = {"consumed_samples": consumed_samples, **values}
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()])
        self.handle.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]  # torch declares it None

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the first image of each sample, and a table of all texts."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import text

        # The PNG as it is: SummaryWriter.add_image would decode and encode it.
        images = [
            Summary.Value(tag=f"samples/{number}", image=Summary.Image(encoded_image_string=base64.b64decode(png)))
            for number, sample in enumerate(samples)
            for png in sample["images"][:1]
        ]
        self.handle.file_writer.add_summary(Summary(value=images), step)  # type: ignore[attr-defined]
        self.handle.file_writer.add_summary(text("samples", _markdown(samples)), step)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Flush and close the event file."""
        self.handle.close()


_WANDB_ID = "wandb_id.txt"


class WandbSink:
    """One W&B run: online with an API key, else offline in run.dir (upload it with `wandb sync`).

    The project is WANDB_PROJECT, or mimo-train. `step` is a logged value and the x axis of every chart, because W&B's
    internal counter cannot step back.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start a run, or resume that of `run_dir` if `resumed_step` is above 0.

        Raises:
            wandb.errors.Error: W&B cannot start the run.
        """
        import wandb

        file = run_dir / _WANDB_ID
        run_id = kept_id(file, resumed_step) or keep_id(file, secrets.token_hex(4))
        mode = os.environ.get("WANDB_MODE") or ("online" if has_api_key() else "offline")
        self.handle = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mimo-train"),
            name=run_dir.name,
            id=run_id,
            resume="allow",
            mode=cast(Any, mode),  # W&B reports invalid values itself
            dir=str(run_dir),
            config=config,
            allow_val_change=True,
            # Do not capture the console: a progress bar becomes thousands of lines.
            settings=wandb.Settings(console="off", silent=mode == "offline"),
        )
        self.handle.define_metric("step")
        self.handle.define_metric("*", step_metric="step")

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Add one row."""
        self.handle.log({"step": step, "consumed_samples": consumed_samples, **values})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add a table `samples` with images and texts."""
        import wandb

        rows = [
            [step, [wandb.Image(_opened(png)) for png in sample["images"]], *(str(sample[word]) for word in _WORDS)]
            for sample in samples
        ]
        self.handle.log({"step": step, "samples": wandb.Table(["step", "images", *_WORDS], rows)})

    def close(self) -> None:
        """End the run; online, wait for the upload."""
        import wandb

        self.handle.finish()
        # W&B's process may still be writing the offline file when `finish` returns; wait for it.
        wandb.teardown()


def has_api_key() -> bool:
    """True if WANDB_API_KEY is set, or netrc has an entry for the W&B server (WANDB_BASE_URL)."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


_MLFLOW_ID = "mlflow_id.txt"
_PARAMETER_LENGTH = 6000
"""Largest parameter in characters that MLflow accepts."""
_IN_FLIGHT = 64
"""Most steps whose values may still be on their way to the server."""


class MlflowHandle(NamedTuple):
    """Arguments that MLflow's functions need to add to the run."""

    client: Any
    run_id: str


class MlflowSink:
    """One MLflow run, in the experiment MLFLOW_EXPERIMENT_NAME, or mimo-train.

    It is stored at MLFLOW_TRACKING_URI, else in a database in run.dir: show it with `mlflow ui --backend-store-uri
    sqlite:///RUN_DIR/mlflow/mlflow.db`. The tag `resumed_after_step` names the last resume.

    MLflow sends values in its own thread, so a slow server does not slow training. It stores the largest float instead
    of infinity.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start a run, or resume that of `run_dir` if `resumed_step` is above 0.

        Raises:
            mlflow.exceptions.MlflowException: the store is unreachable or has no run of that id.
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
        run_id = kept_id(run_dir / _MLFLOW_ID, resumed_step)
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mimo-train")
            experiment = client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else client.create_experiment(name, artifacts)
            run_id = client.create_run(number, run_name=run_dir.name).info.run_id
            keep_id(run_dir / _MLFLOW_ID, run_id)
            for key, value in leaves(config):
                client.log_param(run_id, key, str(value)[:_PARAMETER_LENGTH])
        else:
            client.update_run(run_id, RunStatus.to_string(RunStatus.RUNNING))
            client.set_tag(run_id, "resumed_after_step", resumed_step)
        self.handle = MlflowHandle(client, run_id)
        self._in_flight: deque[Any] = deque()

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Queue every value at `step`.

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

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store the samples of the step with their media, as JSON."""
        client, run_id = self.handle
        client.log_dict(run_id, [dict(sample) for sample in samples], f"samples/step_{step:08d}.json")

    def close(self) -> None:
        """Wait until all values are written, and end the run."""
        while self._in_flight:
            self._in_flight.popleft().wait()
        self.handle.client.set_terminated(self.handle.run_id)


_KEY_FILE = "comet_key.txt"


class CometSink:
    """One Comet experiment: online with an API key, else an archive in run.dir/comet (for `comet upload`).

    The project is COMET_PROJECT_NAME, or mimo-train. A resumed run continues the same experiment; offline it writes
    another archive with the same key, to upload after the first. Comet writes an archive when a run ends: offline
    values of a killed run are in metrics.jsonl only.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start an experiment, or resume that of `run_dir` if `resumed_step` is above 0.

        Raises:
            Exception: Comet cannot start the experiment.
        """
        # Imported here: it takes seconds.
        import comet_ml
        from comet_ml.config import get_api_key, get_config

        kept = kept_id(run_dir / _KEY_FILE, resumed_step)
        online = bool(get_api_key(None, get_config()))
        folder = run_dir / "comet"
        if not online:
            folder.mkdir(parents=True, exist_ok=True)
            logging.getLogger("comet_ml").setLevel(logging.WARNING)
        self.handle = comet_ml.start(
            project_name=os.environ.get("COMET_PROJECT_NAME", "mimo-train"),
            online=online,
            mode="get_or_create" if kept else "create",
            experiment_key=kept,
            experiment_config=comet_ml.ExperimentConfig(
                # Log only our values: no console, no code, nothing that Comet reads from other libraries.
                auto_metric_logging=False,
                auto_param_logging=False,
                auto_output_logging=False,
                auto_log_co2=False,
                display_summary_level=0,
                log_code=False,
                log_graph=False,
                log_env_details=False,
                log_git_metadata=False,
                log_git_patch=False,
                parse_args=False,
                offline_directory=str(folder),
                name=run_dir.name,
            ),
        )
        keep_id(run_dir / _KEY_FILE, self.handle.get_key())
        if not kept:
            self.handle.log_parameters(config)

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write every value at `step`."""
        self.handle.log_metrics({"consumed_samples": consumed_samples, **values}, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the first image of each sample, and all texts."""
        for number, sample in enumerate(samples):
            for png in sample["images"][:1]:
                self.handle.log_image(_opened(png), name=f"samples/{number}", step=step)
        self.handle.log_text(_markdown(samples), step=step)

    def close(self) -> None:
        """End the experiment: online, wait for the upload; offline, write the archive."""
        self.handle.end()
