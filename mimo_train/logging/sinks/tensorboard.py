"""TensorBoard events in run.dir/tensorboard."""

import threading
from pathlib import Path

_WRITER = "tensorboard.summary.writer.event_file_writer"
"""Module of TensorBoard's thread that writes, as of 2.21."""


class TensorboardSink:
    """One scalar for each key, over steps. TensorBoard keeps scalars as 32-bit floats."""

    def __init__(self, folder: Path, resumed_step: int):
        """Write into `folder`; TensorBoard hides what an earlier job wrote there after `resumed_step`."""
        # Imported here: it imports torch, which nothing else in this package needs.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resumed_step + 1 if resumed_step > 0 else 0
        self.handle = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=15)
        # What fails in TensorBoard's thread is raised by the next `log` or `close` too, and told there in one line.
        self._hook = threading.excepthook
        threading.excepthook = self._told_later

    def _told_later(self, failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__ != _WRITER:
            self._hook(failure)

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write every value at `step`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all keys: an event for each costs as much as all of them.
        scalars = {"consumed_samples": consumed_samples, **values}
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()])
        self.handle.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]  # torch declares it None

    def close(self) -> None:
        """Flush and close the event file."""
        try:
            self.handle.close()
        finally:
            threading.excepthook = self._hook
