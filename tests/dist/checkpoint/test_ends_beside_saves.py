"""Runs that are ended, or lose their folder, while a checkpoint is being written beside them: vlm_digits with dropout
on two processes, so that a curve goes on only if the state of every random generator does."""

import os
import signal
import threading
from math import prod
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.checkpoint import save as saves
from mimo_train.checkpoint.format.index import WEIGHT, is_of_rank
from mimo_train.checkpoint.format.read import Reader
from mimo_train.training.callbacks import Callback
from tests.disk_faults import disk_of
from tests.dist.checkpoint.test_saving import DROPOUT, exact, run_config
from tests.dist.ranks import run_ranks
from tests.dist.runs import train_on_ranks
from tests.e2e.test_exit_paths import events

STEPS = ("train.iters=8", "checkpoint.save_interval=3", *DROPOUT)


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    """Folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    train_on_ranks(run_config(digits, folder, *STEPS, "checkpoint.asynchronous=false"))
    return folder


class Held(Callback):
    """Holds the writing thread of rank 1 from the first save until after step 5, before which something happens on
    rank 0; notes what is told."""

    def __init__(self, happens=lambda: None):
        from mimo_train.logging.console import Console

        self.told: list[str] = []
        self._happens, self._gate, self._rank = happens, threading.Event(), int(os.environ["RANK"])
        write = saves.write_rank
        Console.message = lambda console, text: self.tell(text)
        if self._rank == 1:
            saves.write_rank = lambda *arguments: self._gate.wait() and write(*arguments)

    def tell(self, text):
        self.told.append(text)

    def on_step_start(self, state):
        if self._rank == 0 and state.train_state.step == 4:
            self._happens()

    def on_step_end(self, state, result):
        if state.train_state.step >= 5:
            threading.Timer(0.3, self._gate.set).start()  # while the loop waits for it, where it does

    def on_checkpoint(self, state, folder):
        assert (folder / "COMPLETE").is_file(), "told of a checkpoint that is not there"


def _held(cfg, happens) -> list[str]:
    from mimo_train.training.pretrain import pretrain

    held = Held(happens)
    assert pretrain(cfg, callbacks=[held]) == 0
    return held.told


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _without_memory(cfg) -> list[str]:
    """A run whose rank 1 has no memory free for a copy."""
    if os.environ["RANK"] == "1":
        saves.free_memory = lambda: 0
    return _held(cfg, list)


def test_a_signal_while_a_save_is_in_flight_and_a_host_without_memory_for_one(whole, digits, tmp_path):
    """The save is waited for, the last one follows, and the run goes on with the curve of one that was left alone,
    saving at once where there is no memory for a copy."""
    cfg = run_config(digits, tmp_path, *STEPS, "checkpoint.asynchronous=true")
    told, _ = run_ranks(_held, 2, cfg, terminate)
    assert [one["step"] for one in events(tmp_path, "checkpoint")] == ["3", "5"]
    assert events(tmp_path, "exit")[-1] == {"step": "5", "reason": "signal"}
    assert [text.split(" in ")[0] for text in told if "saved checkpoint at step" in text] == [
        "saved checkpoint at step 3 (save_interval)",
        "saved checkpoint at step 5 (signal)",
    ]
    assert [int(folder.name[5:]) for folder in folders.complete(tmp_path)] == [3, 5]
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 2

    told, _ = run_ranks(_without_memory, 2, run_config(digits, tmp_path, *STEPS, "checkpoint.asynchronous=auto"))
    (said,) = (text for text in told if "asynchronous" in text)
    assert "checkpoint.asynchronous=auto: saves block training, because copies take " in said and "not 0" in said
    assert not any("training blocked" in text for text in told)
    assert exact(tmp_path) == exact(whole)


class Fills(Held):
    """Fills the disk of the run, until the console has told of a save that failed."""

    def __init__(self, folder: Path):
        self.ballast = folder / "ballast"
        super().__init__(self.fill)

    def fill(self):
        with pytest.raises(OSError, match="No space left"), open(self.ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(2**12))

    def tell(self, text):
        super().tell(text)
        if self._rank == 0 and text.startswith("no checkpoint"):
            self.ballast.unlink()


def _on_a_full_disk(cfg) -> list[str]:
    from mimo_train.training.pretrain import pretrain

    fills = Fills(Path(cfg.run.dir))
    assert pretrain(cfg, callbacks=[fills]) == 0
    return fills.told


def test_a_disk_that_is_full_under_a_save(whole, digits, tmp_path):
    """A real one: the part of one rank finds no room. Lines of metrics.jsonl wait until there is some."""
    with disk_of("4m", tmp_path):
        told, other = run_ranks(
            _on_a_full_disk, 2, run_config(digits, tmp_path, *STEPS, "checkpoint.asynchronous=true")
        )
        (failed,) = (text for text in told if text.startswith("no checkpoint of step 3: "))
        assert "No space left on device" in failed and failed in other
        assert [int(folder.name[5:]) for folder in folders.complete(tmp_path)] == [6, 8]
        assert exact(tmp_path) == exact(whole)


def test_a_checkpoint_takes_12_bytes_a_parameter(whole):
    """Beside headers, the index and the random generators of each rank, whose sizes do not grow with the parameters."""
    reader = Reader(folders.newest(whole))
    index, ranks = reader.index, len(reader.index.files)
    of_modules = [key for key in index.pieces if not is_of_rank(key)]
    parameters = sum(prod(index.shape(key)) for key in of_modules if key.state == WEIGHT)
    assert parameters > 50_000 and sum(map(index.nbytes, of_modules)) == 12 * parameters
    total = sum(path.stat().st_size for path in folders.newest(whole).iterdir())
    assert total - 12 * parameters < ranks * 50_000 + 400 * len(of_modules) + 20_000
