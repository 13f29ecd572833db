"""What reads the training shards ends with the run, also one that fails, or whose setup does."""

import time

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config


def _left_over(cfg, fails, file) -> bool:
    """Whether the command still runs when the run has ended, in the process of the rank."""
    from mimo_train.flight.processes import process, runs
    from mimo_train.training import setup
    from mimo_train.training.callbacks import Callback
    from mimo_train.training.pretrain import pretrain

    class Looks(Callback):
        found = None

        def look(self):
            while not file.exists():  # the command has written what the first step takes
                time.sleep(0.01)
            pid = int(file.read_text())
            self.found = pid, process(pid).start

        def on_step_end(self, state, result):
            if self.found is None:
                self.look()
            if fails == "step":
                raise RuntimeError("a fault of this test")

    looks = Looks()

    def open_state(*_given):
        looks.look()
        raise RuntimeError("a fault of this test")

    if fails == "setup":
        setup.open_state = open_state
    if fails:
        with pytest.raises(RuntimeError, match="a fault of this test"):
            pretrain(cfg, callbacks=[looks])
    else:
        assert pretrain(cfg, callbacks=[looks]) == 0
    return runs(*looks.found)


@pytest.mark.parametrize("fails", ["", "step", "setup"])
def test_a_command_ends_with_the_run(digits, tmp_path, fails):
    file = tmp_path / "pid"
    command = f"cat {digits}/train/*0.tar | head -c 400000; echo $$ > {file}.new; mv {file}.new {file}; exec sleep 1000"
    cfg = config(
        "vlm_digits",
        tmp_path / "run",
        digits,
        "layout=one_process",
        "data.pad=sequence",
        "data.stream=true",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "train.iters=2",
        f"data.shards='pipe:{command}'",
    )
    assert run_ranks(_left_over, 1, cfg, fails, file) == [False]
