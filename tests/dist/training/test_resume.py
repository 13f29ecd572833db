"""A killed run, started again with the same command, gives the curve of one that was never interrupted."""

import signal
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.exit_callbacks import At
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks

STEPS = 14
DROPOUT = ("modules.images.encoder.dropout=0.1", "modules.language.llm.dropout=0.1")
"""A curve goes on bit by bit only if the random generators of every rank do."""


def run_config(digits: Path, run_dir: Path, *overrides: str):
    """A run that saves every 4 steps."""
    return config(
        "vlm_digits",
        run_dir,
        digits,
        f"train.iters={STEPS}",
        "checkpoint.save_interval=4",
        "checkpoint.keep=2",
        *overrides,
    )


@pytest.fixture(scope="module")
def uninterrupted(digits, tmp_path_factory) -> list[tuple]:
    """Curve of two processes that were left alone."""
    folder = tmp_path_factory.mktemp("whole")
    return curve(train_on_ranks(run_config(digits, folder, "layout=two_processes", *DROPOUT)))


def train_until_killed(cfg, rank: int, step: int) -> int:
    """One rank of a run of which `rank` ends by SIGKILL before `step`."""
    from mimo_train.training.pretrain import pretrain

    return pretrain(cfg, callbacks=[At(rank, step, signal.SIGKILL)])


@pytest.mark.parametrize(("rank", "step"), [(0, 7), (1, 10)], ids=["encoder killed", "language killed"])
def test_killed_run_continues_bitwise(rank, step, uninterrupted, digits, tmp_path):
    cfg = run_config(digits, tmp_path, "layout=two_processes", *DROPOUT)
    with pytest.raises(RankFailure, match="died|Connection|connection|closed"):
        run_ranks(train_until_killed, 2, cfg, rank, step)
    left = curve(read_metrics(tmp_path / "metrics.jsonl"))
    assert 4 <= len(left) < step, "the run was not interrupted behind its first checkpoint"
    assert curve(train_on_ranks(cfg)) == uninterrupted


def test_run_continues_on_another_layout(digits, tmp_path):
    train_on_ranks(run_config(digits, tmp_path, "layout=two_processes", "train.iters=8", "optim.decay=constant"))
    whole = tmp_path / "whole"
    one = curve(train_on_ranks(run_config(digits, whole, "layout=two_processes", "optim.decay=constant")))
    more, fewer = ("layout=images_tp2_language_pp2", "data.pack=true"), ("layout=one_process", "data.pad=sequence")
    for name, changes in (("more, packed", more), ("fewer, in rows of one length", fewer)):
        folder = tmp_path / name
        resume = f"checkpoint.resume={folders.newest(tmp_path)}"
        lines = curve(train_on_ranks(run_config(digits, folder, *changes, resume, "optim.decay=constant")))
        assert [line[0] for line in lines] == list(range(9, STEPS + 1))
        loss, norm = largest_difference(one[8:], lines)
        assert max(loss, norm) < TOLERANCE, f"{name}: loss {loss:.1e}, gradient norm {norm:.1e}"


def test_only_the_newest_checkpoints_stay_and_unfinished_ones_are_ignored(digits, tmp_path):
    cfg = run_config(digits, tmp_path, "layout=one_process")
    train_on_ranks(cfg)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step_00000012", f"step_{STEPS:08d}"]
    unfinished = folders.step_folder(tmp_path, 99)
    unfinished.mkdir()
    assert folders.newest(tmp_path).name == f"step_{STEPS:08d}"


def test_another_order_of_samples_is_refused(digits, tmp_path):
    train_on_ranks(run_config(digits, tmp_path, "layout=one_process", "train.iters=4"))
    for change, words in (
        (f"data.shards={digits}/held_out", r"data\.shards: the shards are not those of checkpoint"),
        ("run.seed=8", r"run\.seed: is 8, and checkpoint .* was trained with \d+, .*set run\.seed="),
        ("data.shuffle=false", r"data\.shuffle: is False, and .* set data\.shuffle=true, or"),
        ("data.blind=true", r"data\.blind: is True, and checkpoint .* was trained with False, so the samples"),
        ("data.shuffle_block=2", r"data\.shuffle_block: is 2, and .* set data\.shuffle_block=1, or"),
    ):
        with pytest.raises(RankFailure, match=words):
            train_on_ranks(run_config(digits, tmp_path, "layout=one_process", change))


def train_and_note_messages(cfg, file: Path) -> int:
    """One rank of a run, whose messages on the console are lines of `file`."""
    from mimo_train.logging.console import Console
    from mimo_train.training.pretrain import pretrain

    def note(_: Console, text: str) -> None:
        with file.open("a") as lines:
            lines.write(f"{text}\n")

    Console.message = note
    return pretrain(cfg)


def test_what_is_otherwise_than_before_is_said(digits, tmp_path):
    short = run_config(digits, tmp_path, "layout=one_process", "train.iters=4")
    unread = "checkpoint.weights=runs/gone"
    others = ("train.iters=5", "data.sequence_length=40", "modules.language.llm.dropout=0.25", "data.workers=1")
    other = run_config(digits, tmp_path, "layout=two_processes", unread, *others)
    starts = ((1, short, "first"), (1, short, "again"), (2, other, "other"))
    for ranks, cfg, name in starts:
        run_ranks(train_and_note_messages, ranks, cfg, tmp_path / name)
    assert "results will differ" not in (tmp_path / "first").read_text() + (tmp_path / "again").read_text()
    assert f"warning: {unread}: not read, since this run continues" in (tmp_path / "other").read_text()
    length = short.data.sequence_length
    said = f"data.sequence_length was {length}, is 40; train.iters was 4, is 5; modules.language.llm.dropout was 0.0"
    warning = f"warning: results will differ from the original run from this step on: {said}, is 0.25\n"
    assert warning in (tmp_path / "other").read_text()


def test_damaged_checkpoint_is_refused(digits, tmp_path):
    cfg = run_config(digits, tmp_path, "layout=one_process", "train.iters=4")
    train_on_ranks(cfg)
    shard = next(folders.newest(tmp_path).glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    shard.write_bytes(damaged)
    with pytest.raises(RankFailure, match=r"rank_00000\.safetensors is damaged between bytes \d+ and \d+: "):
        train_on_ranks(run_config(digits, tmp_path, "layout=one_process"))
