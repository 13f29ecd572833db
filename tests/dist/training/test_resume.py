"""A run that continues on another layout, and what it says of a config that has changed."""

from pathlib import Path

from mimo_train.checkpoint import folders
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks

STEPS = 14


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
