"""`setup` called again in a process: rejected until the first run is closed, and then right."""

import os
from pathlib import Path

from tests.dist.ranks import run_ranks
from tests.dist.runs import config


def _losses(cfg) -> tuple[list[float], object]:
    """Of three steps of a run, which stays open."""
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train_step
    from mimo_train.training.step.forward_step import prepare_forward_step_func
    from mimo_train.training.step.mimo_step import forward_step

    run, losses = setup(cfg), []
    step = prepare_forward_step_func(forward_step, run.state)
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
