"""Weights & Biases: online when a key is configured, else offline in run.dir (`wandb sync` uploads it later).

The run's id is kept in run.dir/wandb_id.txt, so that a resumed run goes on in the same curve. `step` is a value of its
own and the x axis of every chart; W&B's internal counter cannot step back, so after a crash the steps that are trained
again appear twice there, at the same x.
"""

import netrc
import os
import secrets
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from mimo_train.logging.sinks.run_id import keep_id, kept_id

_ID_FILE = "wandb_id.txt"

Mode = Literal["online", "offline", "disabled", "shared"]
"""What WANDB_MODE may say."""


class WandbSink:
    """One W&B run. The project is WANDB_PROJECT, or mimo-train."""

    def __init__(self, run_dir: Path, config: dict[str, Any], resumed_step: int):
        """Start or, with `resumed_step` above 0, go on with the run of `run_dir`.

        Raises:
            wandb.errors.Error: W&B cannot start the run.
        """
        import wandb

        file = run_dir / _ID_FILE
        run_id = kept_id(file, resumed_step) or keep_id(file, secrets.token_hex(4))
        mode = os.environ.get("WANDB_MODE") or ("online" if has_api_key() else "offline")
        self.handle = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mimo-train"),
            name=run_dir.name,
            id=run_id,
            resume="allow",
            mode=cast(Mode, mode),  # of another word W&B says what it is
            dir=str(run_dir),
            config=config,
            allow_val_change=True,
            # The console is ours: captured, a progress bar becomes thousands of lines.
            settings=wandb.Settings(console="off", silent=mode == "offline"),
        )
        self.handle.define_metric("step")
        self.handle.define_metric("*", step_metric="step")

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Add one row."""
        self.handle.log({"step": step, "consumed_samples": consumed_samples, **values})

    def close(self) -> None:
        """End the run; online, waits for the upload."""
        import wandb

        self.handle.finish()
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
