"""Weights & Biases: online when a key is configured, else offline in run.dir (`wandb sync` uploads it later).

The run's id is kept in run.dir/wandb_id.txt, so that a resumed run goes on in the same curve. `step` is a value of its
own and the x axis of every chart; W&B's internal counter cannot step back, so after a crash the steps that are trained
again appear twice there, at the same x.
"""

import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_ID_FILE = "wandb_id.txt"


class WandbSink:
    """One W&B run. The project is WANDB_PROJECT, or mimo-train."""

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start or, with `resumed_step` above 0, go on with the run of `run_dir`.

        Raises:
            wandb.errors.Error: W&B cannot start the run.
        """
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if has_api_key() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mimo-train"),
            name=run_dir.name,
            id=_run_id(run_dir, resumed_step),
            resume="allow",
            mode=mode,
            dir=str(run_dir),
            config=config,
            allow_val_change=True,
            # The console is ours: captured, a progress bar becomes thousands of lines.
            settings=wandb.Settings(console="off", silent=mode == "offline"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Add one row."""
        self._run.log({"step": step, "consumed_samples": consumed_samples, **values})

    def close(self) -> None:
        """End the run; online, waits for the upload."""
        import wandb

        self._run.finish()
        # W&B's own process may still be writing the offline file when `finish` returns; this waits for its end.
        wandb.teardown()


def has_api_key() -> bool:
    """Whether WANDB_API_KEY is set, or netrc has an entry for the W&B server (WANDB_BASE_URL)."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(run_dir: Path, resumed_step: int) -> str:
    """The stored id when the run goes on, a new one (stored) when it starts."""
    file = run_dir / _ID_FILE
    if resumed_step > 0 and file.exists():
        return file.read_text().strip()
    run_id = secrets.token_hex(4)
    file.write_text(run_id + "\n")
    return run_id
