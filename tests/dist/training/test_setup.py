"""Set-up and its surroundings: twice in a process, foreign variables, late signals, folders that cannot be written."""

import errno
import os
import signal
from pathlib import Path

import pytest

from data.errors import DataError
from mimo_train.config.errors import UserError
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_rank


def _losses(cfg) -> tuple[list[float], object]:
    """Of three steps of a run, which stays open."""
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train_step
    from mimo_train.training.step.forward_step import mimo_forward_step, prepare_forward_step_func

    run, losses = setup(cfg), []
    step = prepare_forward_step_func(mimo_forward_step, run.state)
    for _ in range(3):
        result = train_step(step, run.train_data_iterator, run.model, run.optimizer, run.scheduler, run.state)
        losses += [float(value) for value in result[0].values()]
        run.state.train_state.step += 1
    return losses, run


def _one_behind_the_other(first, second) -> tuple[str, list[float], bool, list[float]]:
    """What a second run is refused with while there is the first, the losses of the first, whether anything is recorded
    between the two, and the losses of the second."""
    from mimo_train.bridge.training.setup import setup
    from mimo_train.config.errors import UserError
    from mimo_train.flight.recorder import RECORDER

    losses, run = _losses(first)
    said = ""
    try:
        setup(second)
    except UserError as error:
        said = str(error)
    assert RECORDER.in_use, "the first goes on"
    run.close()
    between = RECORDER.in_use
    others, run = _losses(second)
    run.close()
    return said, losses, between, others


def _alone(cfg) -> list[float]:
    losses, run = _losses(cfg)
    run.close()
    return losses


def test_a_second_run_is_refused_until_the_first_is_closed_and_then_right(digits, tmp_path):
    def of(name: str, seed: int):
        return config(
            "vlm_digits", tmp_path / name, digits, "layout=two_processes", "train.iters=3", f"run.seed={seed}"
        )

    found = run_ranks(_one_behind_the_other, 2, of("first", 1), of("second", 2))
    wanted = run_ranks(_alone, 2, of("alone", 2))
    for (said, losses, between, others), alone in zip(found, wanted, strict=True):
        assert "this process has a run already" in said and "call close()" in said
        assert not between and others == alone and (not losses or losses != others)
    assert any(alone for alone in wanted)


def _open_shards() -> list[str]:
    """Shards that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(Path(os.readlink(entry)))
        except FileNotFoundError:  # that of the look itself
            continue
    return sorted(path.parent.name for path in found if path.suffix == ".tar")


def _shards_before_and_after_close(cfg) -> tuple[list[str], list[str]]:
    from tests.dist.steps import Steps

    steps = Steps(cfg)
    steps.train()
    for one in steps.session.held_out_sets:
        one.evaluate()
    before = _open_shards()
    steps.session.close()
    return before, _open_shards()


def test_a_run_that_is_closed_has_no_shard_open(digits, tmp_path):
    """A process may have one run behind the other, as with `run.inprocess_restarts`."""
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", "train.iters=1", "train.eval_interval=1",
                 f"data.validation_shards={digits}/held_out", "train.eval_samples=8")  # fmt: skip
    ((before, after),) = run_ranks(_shards_before_and_after_close, 1, cfg)
    assert {"train", "held_out"} <= set(before) and not after


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


def _refused(cfg) -> str:
    try:
        train_rank(cfg)
    except (UserError, DataError) as error:
        return str(error)
    return ""


def _refused_on_a_full_disk(cfg) -> str:
    """Of the demo, and of nothing else."""
    from data.demo import make

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make.make_demo = full
    return _refused(cfg)


def test_a_file_in_the_way_ends_every_rank(digits, tmp_path):
    (tmp_path / "file").touch()
    cfg = config("vlm_digits", tmp_path / "file" / "mine", digits, "layout=two_processes")
    one, other = run_ranks(_refused, 2, cfg)
    assert one == other
    assert one.startswith(f"run.dir: the folder {tmp_path}/file/mine cannot be written (Not a directory")


def test_a_demo_that_cannot_be_made_is_named_by_every_rank(digits, tmp_path):
    (tmp_path / "file").touch()
    for refused, folder, why in (
        (_refused, "file/demo", "File exists"),
        (_refused_on_a_full_disk, "demo", "No space left on device"),
    ):
        place = tmp_path / folder
        wanted = ("data.demo=digits", f"data.shards={place}/train", f"data.validation_shards={place}/held_out")
        one, other = run_ranks(refused, 2, config("vlm_digits", tmp_path / "run", digits, *wanted))
        assert one == other and one.startswith(f"data.demo: cannot make the digits demo in {place} (")
        assert why in one and "run.dir" not in one
