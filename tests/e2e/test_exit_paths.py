"""Every way a run of two processes ends: on all ranks, with its exit code, and a checkpoint where one is due."""

import os
import signal
import sys
from pathlib import Path

from mimo_train.checkpoint import folders
from mimo_train.metrics.sinks.jsonl import read_metrics
from mimo_train.plan.run import resolve
from mimo_train.training.exit import ExitVotes
from tests.dist.exit_callbacks import At
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve
from tests.e2e.test_train import digits, finish, start, wait_for, whole_lines  # noqa: F401 (a fixture)

ENCODER, LANGUAGE = 0, 1


def events(run_dir: Path, name: str) -> list[dict[str, str]]:
    """The facts of each line of one event in progress.txt."""
    rows = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    return [dict(fact.split("=", 1) for fact in row[2:]) for row in rows if row[1] == name]


def _rank(cfg, callback: At | None, late_rank: int | None, gone: bool) -> int:
    """One rank as `mimo-train train` runs it; `late_rank` alone finds that its time is over. What it prints is for a
    reader that has gone, or a full disk."""
    if gone:
        read, write = os.pipe()
        os.close(read)
    os.dup2(write if gone else os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = open(1, "w", closefd=False)  # that of pytest goes elsewhere
    from mimo_train.commands.train import main
    from mimo_train.training import pretrain

    if late_rank is not None:
        cfg.train.exit_duration_minutes = 60
    if int(os.environ["RANK"]) == late_rank:
        pretrain.ExitVotes = lambda signal, minutes, start_time: ExitVotes(signal, minutes, start_time - 3600)
    original = pretrain.pretrain
    pretrain.pretrain = lambda run, **options: original(run, callbacks=[callback] if callback else [], **options)
    return main(resolve(cfg))


def test_a_run_ends_for_every_reason_in_turn_and_goes_on(digits, tmp_path):  # noqa: F811
    """One run of 9 steps, ended five times before. Each job is the same command, but for what ends it."""
    jobs = [  # (reason, step it ends at, what ends it)
        ("exit_interval", 2, {"overrides": ("train.exit_interval=2",)}),
        ("exit_duration_minutes", 3, {"late_rank": ENCODER}),
        ("exit_duration_minutes", 4, {"late_rank": LANGUAGE}),
        ("signal", 6, {"callback": At(ENCODER, 6, signal.SIGTERM)}),
        ("signal", 7, {"callback": At(LANGUAGE, 7, signal.SIGUSR1)}),
        ("finished", 9, {}),
    ]
    for number, (reason, step, what) in enumerate(jobs):
        overrides = ("train.iters=9", "layout=two_processes", "checkpoint.keep=0", *what.get("overrides", ()))
        cfg = config("vlm_digits", tmp_path, digits, *overrides)
        codes = run_ranks(_rank, 2, cfg, what.get("callback"), what.get("late_rank"), number % 2 == 0)
        assert codes == [0, 0], reason
        assert events(tmp_path, "exit")[-1] == {"step": str(step), "reason": reason}
        assert folders.newest(tmp_path).name == f"step_{step:08d}"
    assert [(int(save["step"]), save["reason"]) for save in events(tmp_path, "checkpoint")] == [
        (step, reason) for reason, step, _ in jobs
    ], "one save for each exit"
    assert [point[0] for point in curve(read_metrics(tmp_path / "metrics.jsonl"))] == list(range(1, 10))


def test_a_failing_rank_and_a_signal_end_all_and_the_same_command_goes_on(digits, tmp_path, monkeypatch):  # noqa: F811
    """Launched three times. First a callback raises on one rank, so that the other one waits for it in the middle of a
    step, then on the other; then SIGTERM ends the run after its step, with a checkpoint."""
    run_dir = tmp_path / "run"
    arguments = (
        "vlm_digits",
        f"run.dir={run_dir}",
        f"data.shards={digits}/train",
        "data.validation_shards=",
        "data.demo=",
        "train.iters=300",
        "checkpoint.asynchronous=false",  # so that the newest checkpoint at a failure is known
        "checkpoint.save_interval=2",
        "checkpoint.keep=0",
        "modules.language.llm.num_layers=2",
        "train.callbacks=[exit_callbacks:FromEnvironment]",
    )
    # Found from the working directory, as a user's own would be.
    (tmp_path / "exit_callbacks.py").write_text((Path(__file__).parents[1] / "dist" / "exit_callbacks.py").read_text())
    for rank, step in ((ENCODER, 4), (LANGUAGE, 6)):
        monkeypatch.setenv("MIMO_TEST_BREAK", f"{rank}:{step}")
        process = start("train_vlm.sh", *arguments, cwd=tmp_path)
        wait_for((run_dir / f"failed_{rank}").exists, process)
        printed = finish(process)
        assert process.returncode == 1, printed
        assert f"rank {rank}: RuntimeError: broken on purpose before step {step}" in printed
        assert f"rank {rank} (process" in printed.splitlines()[-1], printed
        assert folders.newest(run_dir).name == f"step_{step - 2:08d}"
    assert [(save["step"], save["reason"]) for save in events(run_dir, "checkpoint")] == [
        ("2", "save_interval"),
        ("4", "save_interval"),
    ]
    assert not events(run_dir, "exit"), "a failure is no exit"
    assert [point[0] for point in curve(read_metrics(run_dir / "metrics.jsonl"))] == [1, 2, 3, 4, 5]

    monkeypatch.delenv("MIMO_TEST_BREAK")
    process = start("train_vlm.sh", *arguments, cwd=tmp_path)
    wait_for(lambda: whole_lines(run_dir) >= 8, process)
    process.send_signal(signal.SIGTERM)
    printed = finish(process)
    assert process.returncode == 0, printed
    steps = [point[0] for point in curve(read_metrics(run_dir / "metrics.jsonl"))]
    assert steps == list(range(1, len(steps) + 1))
    assert events(run_dir, "exit") == [{"step": str(steps[-1]), "reason": "signal"}]
    assert folders.newest(run_dir).name == f"step_{steps[-1]:08d}"
    assert [job["step"] for job in events(run_dir, "start")] == ["0", "2", "4"]
