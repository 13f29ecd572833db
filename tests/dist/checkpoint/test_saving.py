"""Saving beside training, and saves that fail: vlm_digits on two processes."""

import errno
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.format.files import INDEX
from mimo_train.flight.read import process
from mimo_train.flight.watchdog import LAUNCHER
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.training.callbacks import Callback
from tests.disk_faults import DiskCalls
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config, train_on_ranks
from tests.e2e.test_exit_paths import events

EXACT = ("step", "consumed_samples", "lm loss", "grad_norm", "learning_rate/language", "bad_samples", "skipped_iters")
"""Numbers of a line that do not depend on the clock."""


def exact(run_dir: Path) -> list[dict]:
    return [{key: line[key] for key in EXACT if key in line} for line in read_metrics(run_dir / "metrics.jsonl")]


DROPOUT = ("modules.images.encoder.dropout=0.2", "modules.language.llm.dropout=0.2")
"""A curve goes on bit by bit only if the random generators of every rank do."""


def run_config(digits: Path, run_dir: Path, *overrides: str):
    return config("vlm_digits", run_dir, digits, "layout=two_processes", "checkpoint.keep=0", *overrides)


class Watch(Callback):
    """Holds the writing thread of one rank until a step begins, and notes which checkpoints were told of when."""

    def __init__(self, rank: int, until: int):
        self.told: list[tuple[int, str]] = []
        self.seen: list[tuple[int, list[str]]] = []
        self._until, self._gate = until, threading.Event()
        if int(os.environ["RANK"]) == rank:
            from mimo_train.checkpoint import save as saves

            write = saves.write_rank
            saves.write_rank = lambda *arguments: self._gate.wait() and write(*arguments)

    def on_step_start(self, state):
        step = state.train_state.step + 1
        self.seen.append((step, [folder.name for folder in folders.complete(state.run_dir)]))
        if step == self._until:
            self._gate.set()

    def on_checkpoint(self, state, folder):
        assert folders.complete(state.run_dir)[-1] == folder
        self.told.append((state.train_state.step, folder.name))


def _watched(cfg, rank: int) -> Watch:
    from mimo_train.training.pretrain import pretrain

    watch = Watch(rank, 6)
    assert pretrain(cfg, callbacks=[watch]) == 0
    watch._gate = None  # is not sent to the test's process
    return watch


def test_training_goes_on_while_a_checkpoint_is_written_and_none_of_it_is_in_there(digits, tmp_path):
    """Rank 1 writes only when two more steps were made: until then there is no checkpoint, and then it is, byte for
    byte, the one that a run leaves that stands still for it. The log's sums go on in the middle of an interval."""
    steps = ("train.iters=12", "train.log_interval=5", "checkpoint.save_interval=4")
    run_ranks(_watched, 2, run_config(digits, tmp_path / "still", *steps, "checkpoint.asynchronous=false"), 2)
    cfg = run_config(digits, tmp_path / "beside", *steps, "checkpoint.asynchronous=true", "checkpoint.save_interval=4")
    for watch in run_ranks(_watched, 2, cfg, 1):
        assert dict(watch.seen)[6] == [], "complete before all have written"
        told = [name for _, name in watch.told]
        assert told == ["step_00000004", "step_00000008", "step_00000012"]
        assert watch.told[0][0] >= 6 and watch.told[-1][0] == 12
    for folder in folders.complete(tmp_path / "still"):
        # So what a test shows of damaged files of the one holds for the other; run.json has the config.
        for file in (*folder.glob("*.safetensors"), folder / INDEX):
            assert file.read_bytes() == (tmp_path / "beside/checkpoints" / folder.name / file.name).read_bytes()
    assert exact(tmp_path / "beside") == exact(tmp_path / "still")

    again = run_config(
        digits, tmp_path / "rest", *steps, f"checkpoint.resume={tmp_path}/beside/checkpoints/step_00000008"
    )
    train_on_ranks(again)
    assert exact(tmp_path / "rest") == exact(tmp_path / "still")[1:], "the line of step 10 is of steps 6 to 10"


class Fails:
    """The writer of rank 1 fails the given times."""

    def __init__(self, codes: dict[int, int]):
        from mimo_train.checkpoint import save as saves

        self._codes, self._count, self._write = codes, 0, saves.write_rank
        if int(os.environ["RANK"]) == 1:
            saves.write_rank = self

    def __call__(self, *arguments):
        self._count += 1
        if code := self._codes.get(self._count):
            raise OSError(code, os.strerror(code))
        return self._write(*arguments)


def _failing(cfg, codes: dict[int, int]) -> list[str]:
    """One rank of a run; returns what it told."""
    from mimo_train.logging.console import Console
    from mimo_train.training import saving
    from mimo_train.training.pretrain import pretrain

    saving.MAX_FAILED_SAVES = 1
    Fails(codes)
    told: list[str] = []
    Console.message = lambda self, text: told.append(text)
    assert pretrain(cfg) == 0
    return told


def test_a_save_that_fails_does_not_end_the_run_until_too_many_do(digits, tmp_path):
    """Beside training, and then, going on, while training stands still."""
    saving = ("train.iters=10", "checkpoint.save_interval=2")
    cfg = run_config(digits, tmp_path, *saving, "checkpoint.asynchronous=true")
    told, other = run_ranks(_failing, 2, cfg, {2: errno.ENOSPC, 4: errno.EROFS})
    saves = [[text.split(" in ")[0] for text in texts if not text.startswith("step ")] for texts in (told, other)]
    assert saves[0] == saves[1]
    saved = ["2", "6", "10"]
    assert [save["step"] for save in events(tmp_path, "checkpoint")] == saved
    assert [str(int(folder.name[5:])) for folder in folders.complete(tmp_path)] == saved
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(saved)
    first, second = (text for text in told if text.startswith("no checkpoint of step"))
    assert first.startswith(f"no checkpoint of step 4: run.dir: {tmp_path} cannot take more files (No space left")
    assert second.startswith(f"no checkpoint of step 8: run.dir: a checkpoint cannot be written to {tmp_path} ([Errno")
    assert first.endswith("the next failure would end the run")

    longer = run_config(digits, tmp_path, *saving, "train.iters=20", "checkpoint.asynchronous=false")
    with pytest.raises(RankFailure, match=r"SaveFailed: run\.dir: .* \(\[Errno 5\] Input/output error\)"):
        run_ranks(_failing, 2, longer, {2: errno.EIO, 3: errno.EIO})
    assert folders.newest(tmp_path).name == "step_00000012"


def _asked_to_exit(cfg) -> str:
    """A run whose first step wants a checkpoint and another machine; how it ends."""
    from mimo_train.checkpoint.save import SaveFailed
    from mimo_train.debug.rerun import Rerun
    from mimo_train.training.pretrain import pretrain

    Rerun.verdict = lambda self: (True, True, 16)
    Fails({1: errno.EIO})
    try:
        return f"exit code {pretrain(cfg)}"
    except SaveFailed as error:
        return str(error)


def test_a_run_that_a_step_ends_does_not_pass_over_its_last_save(digits, tmp_path):
    """Exit 16 says that a checkpoint is there, to go on from on another machine."""
    cfg = run_config(digits, tmp_path, "train.iters=2")
    one, other = run_ranks(_asked_to_exit, 2, cfg)
    assert one == other and "Input/output error" in one, one


class Spoil(Callback):
    """A weight becomes NaN as by an update, on the rank of the language model."""

    def on_train_start(self, state, model):
        from mimo_train.models.parameters import modules_of

        self.chunks = modules_of(model).get("language", [])

    def on_step_end(self, state, result):
        if state.train_state.step == 3 and self.chunks:
            named = dict(self.chunks[0].named_parameters())
            next(value for name, value in named.items() if "linear_fc1.weight" in name).data[0, 0] = float("nan")


def _spoilt(cfg) -> int:
    from mimo_train.training.pretrain import pretrain

    return pretrain(cfg, callbacks=[Spoil()])


def test_weights_that_are_not_finite_are_no_checkpoint(digits, tmp_path):
    cfg = run_config(digits, tmp_path, "train.iters=3", "checkpoint.save_interval=2")
    words = r"weights are not finite: language .*linear_fc1\.weight; the newest checkpoint is as it was"
    with pytest.raises(RankFailure, match=words):
        run_ranks(_spoilt, 2, cfg)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step_00000002"]


ROUNDS = int(os.environ.get("MIMO_KILL_ROUNDS", "3"))
"""Kills of a run before it may end, for each log interval; at more than the default ones, with both intervals."""
IN_A_SAVE, AT_A_STEP, THE_LAUNCHER = range(3)


class Kill(Callback):
    """Kills one rank at a call by which it writes a checkpoint, or at the start of a step, or the launcher then."""

    def __init__(self, what: int, rank: int, step: int, call: int, launcher: int):
        self._mine, self._step, self._launcher = int(os.environ["RANK"]) == rank, step, launcher
        if self._mine and what == IN_A_SAVE:
            DiskCalls(call, self.kill).install()
        if what != THE_LAUNCHER:
            self._launcher = os.getpid()
        self._at_a_step = self._mine and what != IN_A_SAVE

    @staticmethod
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def on_step_start(self, state):
        if self._at_a_step and state.train_state.step + 1 == self._step:
            os.kill(self._launcher, signal.SIGKILL)
            time.sleep(2)  # in which both ranks notice; if they do not, nothing is lost


def _killed(cfg, what: int, rank: int, step: int, call: int, launcher: int) -> int:
    from mimo_train.training.pretrain import pretrain

    os.environ |= {"TORCHELASTIC_RUN_ID": "none", LAUNCHER: f"{launcher}:{process(launcher).start}"}  # as if launched
    return pretrain(cfg, callbacks=[Kill(what, rank, step, call, launcher)])


def raw_steps(run_dir: Path) -> list[int]:
    """Steps of the lines of metrics.jsonl, none of which is torn."""
    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


@pytest.mark.parametrize("interval", [5] if ROUNDS <= 3 else [1, 5])
def test_kills_at_steps_and_inside_saves_leave_the_curve_as_it_is(interval, digits, tmp_path):
    """Of a rank at a step, of one inside a save, and of what has launched them (here a process that does nothing; with
    the real launcher: tests/e2e/test_kills.py). MIMO_KILL_ROUNDS=25 makes 50 rounds of it."""
    generator = random.Random(interval)
    steps = (f"train.iters={6 + 3 * ROUNDS}", f"train.log_interval={interval}", "checkpoint.save_interval=3", *DROPOUT)
    train_on_ranks(run_config(digits, tmp_path / "whole", *steps))
    cfg = run_config(digits, tmp_path / "killed", *steps)
    killed = [0, 0, 0]
    for number in range(ROUNDS):
        newest = folders.newest(tmp_path / "killed")
        begins = int(newest.name[5:]) if newest else 0
        what, rank = number % 3, generator.randrange(2)
        with subprocess.Popen(["sleep", "1000"]) as launcher:
            try:
                when = (rank, begins + generator.randrange(2, 6), generator.randrange(24))
                run_ranks(_killed, 2, cfg, what, *when, launcher.pid)
                killed[what] += what == THE_LAUNCHER and launcher.poll() is not None
            except RankFailure:
                killed[what] += 1
            launcher.kill()
    assert all(killed), killed
    train_on_ranks(cfg)
    assert exact(tmp_path / "killed") == exact(tmp_path / "whole")
    assert raw_steps(tmp_path / "killed") == raw_steps(tmp_path / "whole")
    print(f"log_interval {interval}: killed inside a save {killed[0]}, at a step {killed[1]}, launcher {killed[2]}")
