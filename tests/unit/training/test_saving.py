"""One save is in flight; what it comes to is known on every rank at the same step."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mimo_train.checkpoint import save as saves
from mimo_train.checkpoint.save import Save, SaveFailed, Snapshot, Target
from mimo_train.training import saving
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.saving import Saver
from mimo_train.training.step.state import TrainState
from tests.unit.configs import load


class Slow:
    """A checkpointer whose saves are never done before they are waited for."""

    def __init__(self, calls: list, clock: list):
        self.calls, self.clock, self.memory_shortage, self.resumed_step = calls, clock, "", -1

    def begin(self, data, *, non_persistent):
        self.calls.append("begin")

    def poll(self):
        return None

    def finish(self):
        self.calls.append("finish")
        self.clock[0] += 5
        return Path("step")


def test_a_save_waits_for_the_one_before_and_says_so(monkeypatch):
    calls, told, clock = [], [], [0.0]
    monkeypatch.setattr(saving.time, "perf_counter", lambda: clock[0])
    timer = SimpleNamespace(start=list, stop=list, elapsed=lambda **_: 0.0)
    state = SimpleNamespace(
        cfg=load("vlm_digits", "checkpoint.save_interval=1"),
        last_step=1000,
        train_state=TrainState(),
        console=SimpleNamespace(message=told.append),
        timers=lambda name, log_level: timer,
        is_logging_rank=False,
        run_dir=Path("run"),
    )
    counts = SimpleNamespace(settle=list)
    session = SimpleNamespace(state=state, checkpointer=Slow(calls, clock), counts=counts)
    saver, votes = Saver(session, Callbacks()), SimpleNamespace(signalled=False, out_of_time=False)
    for step in (1, 2, 3):
        state.train_state.step = step
        assert not saver.save_and_decide_exit(None, votes)
    assert calls == ["begin", "finish", "begin", "finish", "begin"], "never two at once"
    waits = [text for text in told if text.startswith("waited")]
    assert waits == ["waited 5 s for the previous checkpoint: saves take longer than the steps between them"] * 2


def test_a_commit_that_fails_in_its_thread_is_known_to_all_ranks_at_one_step(tmp_path, monkeypatch):
    """Rank 0 alone commits. Each message has what `local_status` was when it was sent, summed over the ranks."""
    ranks, removed = [], []

    def commit(*_, **__):
        raise OSError(28, "No space left on device")

    def together(_error, _run_dir):
        if any(rank._job.error for rank in ranks):
            raise SaveFailed("run.dir: full")

    monkeypatch.setattr(saves, "raise_together", together)
    monkeypatch.setattr(saves, "complete", commit)
    monkeypatch.setattr(saves, "_create_folder", lambda target, nbytes: tmp_path / "step")
    monkeypatch.setattr(saves, "write_rank", lambda *_: None)
    monkeypatch.setattr(saves.folder_changes, "remove", removed.append)
    for number in (0, 1):
        monkeypatch.setattr(saves.dist, "get_rank", lambda number=number: number)
        ranks.append(Save(Target(tmp_path, 4, False, 0, 0), [], {}, (0, 0), Snapshot()))
    for step in range(2):
        for rank in ranks:
            rank._job.join(20)
        busy, failed = (sum(column) for column in zip(*(rank.local_status() for rank in ranks), strict=True))
        assert (busy, failed) == (0, step), "the parts are written at the first, the commit has failed at the second"
        for rank in ranks:
            if step:
                with pytest.raises(SaveFailed):
                    rank.poll(busy, failed)
            else:
                assert not rank.poll(busy, failed)
    assert removed == [tmp_path / "step"] and not any(rank.is_complete for rank in ranks)
