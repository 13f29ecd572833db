"""A callback under which reading stands still, as a plugin of a user's may."""

import threading
import time
from pathlib import Path

from mimo_train.training.callbacks import Callback

SAMPLE = 50


class SlowReading(Callback):
    """Texts are read slowly, so that threads read ahead, and none of a sample from SAMPLE on until there is a file `go`
    in the working directory; leaves a file `slow` there."""

    def on_train_start(self, state, model):
        from data.samples.shard_dataset import ShardDataset

        read = ShardDataset.read_text

        def read_text(samples, number):
            time.sleep(0.01)
            if number >= SAMPLE and not Path("go").exists():
                Path("slow").touch()
                threading.Event().wait()
            return read(samples, number)

        ShardDataset.read_text = read_text


class FailsWhileReading(SlowReading):
    """SlowReading, and an error in the first step behind which a thread reads a sample that does not come."""

    def on_step_end(self, state, result):
        if Path("slow").exists():
            raise ValueError("an error of a callback")
