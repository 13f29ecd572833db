"""TensorBoard events in run.dir/tensorboard."""

from pathlib import Path


class TensorboardSink:
    """One scalar for each key, over steps. TensorBoard keeps scalars as 32-bit floats."""

    def __init__(self, folder: Path, resumed_step: int):
        """Write into `folder`; TensorBoard hides what an earlier job wrote there after `resumed_step`."""
        # Imported here: it imports torch, which nothing else in this package needs.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resumed_step + 1 if resumed_step > 0 else 0
        self.handle = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=15)

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write every value at `step`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all keys: an event for each costs as much as all of them.
        scalars = {"consumed_samples": consumed_samples, **values}
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()])
        self.handle.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]  # torch declares it None

    def close(self) -> None:
        """Flush and close the event file."""
        self.handle.close()
