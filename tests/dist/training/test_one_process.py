"""What surrounds a run of one process: variables that something else has set, late signals, a full disk."""

import errno
import os
import signal
from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config


@pytest.fixture(scope="module")
def surroundings(digits, tmp_path_factory) -> dict:
    """What became of two runs, one after the other in the same process."""
    runs = tmp_path_factory.mktemp("runs")
    cfgs = [config("vlm_digits", runs / name, digits, "layout=one_process", "train.iters=3") for name in ("a", "b")]
    return run_ranks(_both, 1, *cfgs)[0] | {"full": runs / "b"}


def _both(cfg, full) -> dict:
    from mimo_train.config.errors import UserError
    from mimo_train.launch.exit_signal import ExitSignal
    from mimo_train.training.callbacks import Callback
    from mimo_train.training.pretrain import pretrain

    signal.signal(signal.SIGINT, signal.default_int_handler)

    class PressesCtrlC(Callback):
        def on_step_end(self, state, result):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # as a wrapper forwards it

    # An address that nobody answers at, as another program may have left it.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    found = {"code": pretrain(cfg, exit_signal=ExitSignal().listen(), callbacks=[PressesCtrlC()])}
    found["saved"] = sorted(path.name for path in Path(cfg.run.dir, "checkpoints").glob("step_*"))
    os.kill(os.getpid(), signal.SIGTERM)
    found["alive"] = True

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = no_space
    try:
        pretrain(full)
    except UserError as error:
        found["said"] = str(error)
    return found


def test_one_process_meets_nobody(surroundings):
    """It would wait for the address in the environment."""
    assert surroundings["code"] == 0


def test_ctrl_c_ends_the_run_of_a_program_with_a_checkpoint(surroundings):
    assert surroundings["saved"] == ["step_00000002"]  # the vote of the next step


def test_a_signal_after_the_run_ends_nothing(surroundings):
    """The report and the summary are still to come."""
    assert surroundings["alive"]


def test_a_full_disk_is_named_with_the_folder(surroundings):
    assert surroundings["said"].startswith(f"run.dir: {surroundings['full']} cannot take more files (No space left")
    assert not list((surroundings["full"] / "checkpoints").glob("step_????????"))
