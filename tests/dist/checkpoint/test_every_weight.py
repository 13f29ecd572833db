"""A run that continues from a checkpoint draws no weights that it reads."""

import shutil
from pathlib import Path

from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_rank

FROZEN = ("modules.images.freeze=[encoder]", "checkpoint.trained_only=true")


def _started(cfg, vanish: bool) -> tuple[int, str]:
    """Numbers that are drawn while a run is set up, and what it fails with."""
    from encoders import initial_weights
    from mimo_train.config.errors import UserError
    from mimo_train.launch.exit_signal import ExitSignal
    from mimo_train.layout.run import resolve
    from mimo_train.training import setup
    from mimo_train.training.shutdown import ExitVotes

    numbers, fill, looks = 0, initial_weights.fill, setup.loads_every_weight

    def counted(block, *place, **begin):
        nonlocal numbers
        numbers += block.numel()
        fill(block, *place, **begin)

    def looked(run):
        found = looks(run)
        if vanish:
            shutil.rmtree(run.checkpoints / "checkpoints")
        return found

    initial_weights.fill, setup.loads_every_weight = counted, looked
    try:
        session = setup.setup(resolve(cfg), ExitVotes(ExitSignal(), 0, 0), start_time=0.0)
    except UserError as error:
        return numbers, str(error)
    assert all(parameter.isfinite().all() for chunk in session.model for parameter in chunk.parameters())
    session.close()
    return numbers, ""


def test_a_checkpoint_of_all_weights_leaves_none_to_draw(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", "train.iters=1", "checkpoint.save_interval=1")
    ((first, _),) = run_ranks(_started, 1, cfg, False)
    assert first > 10_000
    run_ranks(train_rank, 1, cfg)
    assert run_ranks(_started, 1, cfg, False) == [(0, "")]
    ((drawn, error),) = run_ranks(_started, 1, cfg, True)
    assert drawn == 0 and error.startswith("checkpoint.resume: ")


def test_weights_that_a_checkpoint_leaves_out_are_drawn(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", "train.iters=1", "checkpoint.save_interval=1",
                 *FROZEN)  # fmt: skip
    run_ranks(train_rank, 1, cfg)
    ((drawn, error),) = run_ranks(_started, 1, cfg, False)
    assert drawn > 10_000 and not error
    assert Path(tmp_path, "checkpoints").is_dir()


def _refused(cfg) -> str:
    """What a rank says of a start that is refused."""
    from data.errors import DataError
    from data.storage import files
    from mimo_train.config.errors import UserError
    from tests.dist.steps import Steps

    files._FIRST_PAUSE = 0.01  # between tries
    try:
        Steps(cfg).session.close()
    except (UserError, DataError) as error:
        return str(error)
    return ""


def test_a_place_that_nobody_can_look_into_is_told_by_every_rank(digits, tmp_path):
    """Rank 0 alone looks for a checkpoint before the model is built: its error must not leave the others waiting."""
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", "train.iters=1",
                 "data.read_retries=0", "checkpoint.resume=http://127.0.0.1:1/run")  # fmt: skip
    one, other = run_ranks(_refused, 2, cfg)
    assert one == other and one.startswith("checkpoint http://127.0.0.1:1/run cannot be read")
