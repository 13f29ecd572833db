"""Comet: online when a key is configured, else an archive in run.dir/comet (`comet upload` sends it later).

The experiment's key is kept in run.dir/comet_key.txt, so that a resumed run goes on in the same experiment: online at
once, offline by another archive of the same key, to upload after the first. Comet writes an archive when a run ends:
what a killed run had logged offline is in metrics.jsonl only. Steps that are trained again after a crash are there
twice, the later value last.
"""

import logging
import os
from pathlib import Path
from typing import Any

from mimo_train.logging.sinks.run_id import keep_id, kept_id

_KEY_FILE = "comet_key.txt"


class CometSink:
    """One Comet experiment. The project is COMET_PROJECT_NAME, or mimo-train."""

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start or, with `resumed_step` above 0, go on with the experiment of `run_dir`.

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
                # What we log is what is there: no console, no code, nothing that Comet reads from other libraries.
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

    def close(self) -> None:
        """End the experiment: online, wait for the upload; offline, write the archive."""
        self.handle.end()
