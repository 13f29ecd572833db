"""When a run saves, of which kind, and that nothing is saved twice or while replicas differ."""

import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from mimo_train.checkpoint import folders
from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.training.callbacks import Callback
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config, curve


class Saves(Callback):
    """Notes the folder of every checkpoint."""

    def __init__(self):
        self.folders: list[str] = []

    def on_checkpoint(self, state, folder: Path):
        assert (folder / folders.RECORD).is_file()
        self.folders.append(str(folder.relative_to(state.run_dir / "checkpoints")))


class Listed(Callback):
    """Of `train.callbacks`."""

    told: ClassVar[list[str]] = []

    def on_checkpoint(self, state, folder: Path):
        self.told.append(folder.name)


class DriveApart(Callback):
    """Changes the weights of the last rank only."""

    def on_train_start(self, state, model):
        from mimo_train.models.parameters import modules_of

        self.chunks = modules_of(model).get("language")

    def on_step_end(self, state, result):
        import torch.distributed as dist

        if state.train_state.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
            next(self.chunks[0].parameters()).data.add_(1e-3)


def train_with(cfg, kind: type[Callback]) -> Callback:
    """One rank of a run with a callback; returns the callback."""
    from mimo_train.training.pretrain import pretrain

    callback = kind()
    assert pretrain(cfg, callbacks=[callback]) == 0
    return callback


def saves(cfg) -> list[str]:
    """Folders of the checkpoints, as every rank was told."""
    first, *others = [saved.folders for saved in run_ranks(train_with, resolve(cfg).layout.world_size, cfg, Saves)]
    assert all(other == first for other in others)
    return first


def reasons(run_dir: Path) -> list[str]:
    rows = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    return [dict(fact.split("=", 1) for fact in row[2:])["reason"] for row in rows if row[1] == "checkpoint"]


def test_both_kinds_are_saved_at_their_intervals_and_never_twice(digits, tmp_path):
    intervals = ("checkpoint.save_interval=4", "checkpoint.non_persistent_interval=2", "train.iters=11")
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", *intervals)
    assert saves(cfg) == [
        "non_persistent/step_00000002",
        "step_00000004",
        "non_persistent/step_00000006",
        "step_00000008",
        "non_persistent/step_00000010",
        "step_00000011",
    ]
    assert reasons(tmp_path) == [
        "non_persistent_interval",
        "save_interval",
        "non_persistent_interval",
        "save_interval",
        "non_persistent_interval",
        "finished",
    ]
    assert [folder.name for folder in folders.complete(tmp_path, non_persistent=True)] == ["step_00000010"]
    whole = curve(read_metrics(tmp_path / "metrics.jsonl"))

    # As if the run had died in its last step.
    shutil.rmtree(folders.step_folder(tmp_path, 11))
    assert saves(cfg) == ["step_00000011"]
    assert curve(read_metrics(tmp_path / "metrics.jsonl")) == whole


def test_parameters_still_on_their_way_are_saved_whole(digits, tmp_path):
    """Overlapped gathering leaves the other ranks' part of the weights to the next forward pass."""

    def run(name: str, *overrides: str) -> list[tuple]:
        cfg = config("vlm_digits", tmp_path / name, digits, "layout=images_dp2_language_dp2", *overrides)
        saves(cfg)
        return curve(read_metrics(tmp_path / name / "metrics.jsonl"))

    overlap = ("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true", "optim.decay=constant")
    whole = run("whole", "train.iters=6", *overlap)
    assert run("parts", "train.iters=3", *overlap) == whole[:3]
    assert run("parts", "train.iters=6", *overlap) == whole


COMPARED = ("train.rerun=validate_results", "checkpoint.save_interval=2")


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_replicas_that_differ_are_not_saved(axis, digits, tmp_path):
    layout = ("layout=two_processes", f"modules.language.layout.{axis}=2")
    cfg = config("vlm_digits", tmp_path, digits, *layout, "train.iters=6", *COMPARED)
    with pytest.raises(
        RankFailure, match=r"weights on rank \d differ from those of its data-parallel replicas.*step 4"
    ):
        run_ranks(train_with, 3, cfg, DriveApart)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step_00000002"]


def test_replicas_are_compared_by_the_layout_of_their_module(digits, tmp_path):
    """Ranks that hold different parts of an encoder hold the same language model."""
    layout = ("layout=one_process", "modules.images.layout.tp=2", "modules.language.layout.dp=2")
    cfg = config("vlm_digits", tmp_path, digits, *layout, "train.iters=2", *COMPARED)
    assert saves(cfg) == ["step_00000002"]


def _asked_for_and_due(cfg) -> list[str]:
    """Folders saved where a step asks for a checkpoint that is due at the same step."""
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import checkpoint_and_decide_exit, save_checkpoint_and_time, train_step
    from mimo_train.training.step.forward_step import mimo_forward_step, prepare_forward_step_func

    callback = Saves()
    run = setup(cfg, callbacks=[callback])
    state, saved = run.state, (run.state, run.model, run.optimizer, run.scheduler, 0.0, run.checkpointing_context)
    run.train_data_iterator.advance()
    step_func = prepare_forward_step_func(mimo_forward_step, state)
    train_step(step_func, run.train_data_iterator, run.model, run.optimizer, run.scheduler, state)
    for state.train_state.step in (1, 2):
        save_checkpoint_and_time(*saved, train_data_iterator=run.train_data_iterator)
        ends = checkpoint_and_decide_exit(*saved, run.train_data_iterator)
        assert ends == (state.train_state.step == 2)
    run.close()
    assert Listed.told == callback.folders, "those of the config are called too"
    return callback.folders


def test_a_step_that_was_saved_is_not_saved_again(digits, tmp_path):
    listed = f"train.callbacks=[{__name__}:Listed]"
    saving = ("train.iters=2", "checkpoint.save_interval=1", listed)
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", *saving)
    assert run_ranks(_asked_for_and_due, 1, cfg) == [["step_00000001", "step_00000002"]]
    assert reasons(tmp_path) == ["asked", "asked"]
