"""A run of one process that fails while one of its threads waits for a sample that does not come."""

from tests.e2e.test_train import digits, finish, start, vlm  # noqa: F401 (a fixture)

CALLBACK = """
import threading, time
from data import workers
from data.samples.shard_dataset import ShardDataset
from mimo_train.training.callbacks import Callback

class FailsWhileReading(Callback):
    waits = threading.Event()

    def on_train_start(self, state, model):
        workers._PATIENCE, read = 0.1, ShardDataset.read_text

        def read_text(samples, number):
            time.sleep(0.01)  # so that threads read ahead
            if number >= 50:
                self.waits.set()
                threading.Event().wait()
            return read(samples, number)

        ShardDataset.read_text = read_text

    def on_step_end(self, state, result):
        if self.waits.is_set():
            raise ValueError("an error of a callback")
"""


def test_a_run_of_one_process_that_fails_does_not_wait_for_a_reader_that_hangs(digits, tmp_path):  # noqa: F811
    (tmp_path / "my_callbacks.py").write_text(CALLBACK)
    options = ("train.iters=12", "train.eval_interval=0", "checkpoint.save_interval=0", "data.workers=2")
    own = ("layout=one_process", "train.callbacks=[my_callbacks:FailsWhileReading]")
    process = start("train_vlm.sh", *vlm(digits, tmp_path / "run", *options, *own), cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 1, printed
    assert "ValueError: an error of a callback" in printed
