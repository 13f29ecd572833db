"""TensorBoard events in run.dir/tensorboard."""

from pathlib import Path


class TensorboardSink:
    """One scalar for each key, over steps. TensorBoard keeps scalars as 32-bit floats."""

    def __init__(self, folder: Path, resumed_step: int):
        """Write into `folder`; TensorBoard hides what an earlier job wrote there after `resumed_step`."""
        # Imported here: it imports torch, which nothing else in this package needs.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resumed_step + 1 if resumed_step > 0 else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=15)

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Write every value at `step`."""
        for key, value in {"consumed_samples": consumed_samples, **values}.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
