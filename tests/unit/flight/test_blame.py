"""Who is blamed, from files as ranks write them; here all ranks are this process."""

import subprocess
import sys
from pathlib import Path

import pytest

from mimo_train.config.errors import UserError
from mimo_train.flight.blame import look, report
from mimo_train.flight.file_format import BACKWARD, ERROR, FOLDER, FORWARD, MAGIC, OPERATIONS, RECEIVE, SEND
from mimo_train.flight.read import newest_start, process, read_ranks
from mimo_train.flight.recorder import KEPT_STARTS, Recorder, remove_old_starts

SUM, SENDS, TAKES = (OPERATIONS.index(name) for name in ("allreduce", "send", "recv"))


class Ranks:
    """The recorders of a run whose ranks are in one group."""

    def __init__(self, run_dir: Path, size: int, begun: int | None = None):
        self.run_dir, self.size = run_dir, size
        self.all = [Recorder() for _ in range(size if begun is None else begun)]
        self.sums = []
        for number, recorder in enumerate(self.all):
            recorder.open(run_dir, number, size)
            recorder.group(1, "0", "language dp", range(size))
            self.sums.append(recorder.channel(1, -1, 0))
            recorder.to("loop")
            recorder.begin_step(7)

    def __getitem__(self, rank: int) -> Recorder:
        return self.all[rank]

    def sum(self, rank: int, nbytes: int = 32, *, waits: bool = True) -> None:
        """A rank calls the next all-reduce, and stays in it if it `waits`."""
        number = self[rank].issue(self.sums[rank], SUM, nbytes)
        if waits:
            self[rank].wait(self.sums[rank], SUM, number)

    def message(self, rank: int, operation: int, peer: int) -> None:
        """A rank stays in its first send or receive."""
        channel = self[rank].channel(1, peer, SEND if operation == SENDS else RECEIVE)
        self[rank].wait(channel, operation, self[rank].issue(channel, operation, 64))

    def verdict(self, *moving: int):
        """What is said, where all live and `moving` make progress."""

        def meanwhile(_seconds: float) -> None:
            for number, recorder in enumerate(self.all):
                if number in moving:
                    recorder.tick()
                recorder.beat(0.0)

        meanwhile(0.0)
        return look(newest_start(self.run_dir), meanwhile)


@pytest.fixture(autouse=True)
def one_start(monkeypatch):
    """All recorders are of one start of a run."""
    for name, value in {"MASTER_ADDR": "node", "MASTER_PORT": "1", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)


def died(ranks: Ranks, *numbers: int) -> None:
    """Make ranks those of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        found = process(child.pid)
    assert found is not None
    for number in numbers:
        ranks[number].record.pid, ranks[number].record.start = child.pid, found.start


def test_who_has_not_called_a_collective_keeps_the_others_waiting(tmp_path):
    ranks = Ranks(tmp_path, 3)
    for rank in (0, 2):
        ranks.sum(rank)
    ranks[1].enter("data_wait")
    ranks[1].note(0, "shards/000003.tar")
    verdict = ranks.verdict()
    assert verdict.blamed == [1] and "ranks 0, 2 wait for it" in verdict.reason
    assert [edge.on for edge in verdict.waits[0]] == [1]
    text = report(tmp_path, verdict)
    assert "step 7, loop > data_wait" in text and "reads shards/000003.tar" in text
    assert "waits for rank 1: allreduce #1 of language dp [0, 1, 2]" in text


def test_edges_are_followed_over_groups_and_messages(tmp_path):
    ranks = Ranks(tmp_path, 4)
    ranks[0].at("images->language", BACKWARD, 1)
    ranks.message(3, TAKES, 2)
    ranks.message(2, SENDS, 0)
    ranks.message(0, TAKES, 1)
    ranks[1].enter("forward_backward")
    verdict = ranks.verdict()
    assert {rank: [edge.on for edge in edges] for rank, edges in verdict.waits.items()} == {3: [2], 2: [0], 0: [1]}
    assert verdict.blamed == [1] and "ranks 0, 2, 3 wait for it" in verdict.reason
    assert "images->language, microbatch 1, backward, in recv #1 from rank 1" in report(tmp_path, verdict)


def test_nobody_is_blamed_while_the_one_that_is_waited_for_works(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.sum(0)
    ranks[1].enter("evaluate")
    assert ranks.verdict(1).blamed == []
    assert ranks.verdict().blamed == [1]


def test_of_a_circle_the_furthest_has_left_something_out(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks[0].at("images->language", FORWARD, 1)
    ranks.message(0, TAKES, 1)
    ranks[1].at("images->language", BACKWARD, 0)
    ranks.message(1, TAKES, 0)
    verdict = ranks.verdict()
    assert verdict.blamed == [1] and "wait for each other" in verdict.reason


@pytest.mark.parametrize("size", [2, 4])
def test_the_odd_one_out_of_a_collective_is_blamed(tmp_path, size):
    ranks = Ranks(tmp_path, size)
    for rank in range(size):
        if rank == 1:
            ranks[rank].enter("optimizer")
        ranks.sum(rank, nbytes=408 if rank == 1 else 32)
    died(ranks, *range(size))
    verdict = ranks.verdict()
    assert verdict.blamed == [1]
    assert "collective #1 of language dp" in verdict.reason
    assert "allreduce of 408 bytes in step 7 on rank 1" in verdict.reason


def test_ranks_that_never_began(tmp_path):
    ranks = Ranks(tmp_path, 3, begun=2)
    for rank in (0, 1):
        ranks[rank].to("join")
    verdict = ranks.verdict()
    assert verdict.blamed == [2] and "never began" in verdict.reason
    assert "rank 2: has not begun" in report(tmp_path, verdict)


def test_a_rank_that_is_gone_is_blamed_before_one_that_lives(tmp_path):
    ranks = Ranks(tmp_path, 3)
    ranks.sum(0)
    died(ranks, 2)
    verdict = ranks.verdict()
    assert verdict.blamed == [2] and verdict.states[2] == "gone"


def test_ranks_that_wait_for_nobody_are_all_named(tmp_path):
    ranks = Ranks(tmp_path, 2)
    for rank in (0, 1):
        ranks[rank].to("index")
    assert ranks.verdict().blamed == [0, 1]


def test_of_a_dead_run_the_one_with_an_error_is_blamed(tmp_path):
    ranks = Ranks(tmp_path, 3)
    for rank in (0, 2):
        ranks.sum(rank)
    ranks[1].note(ERROR, "RuntimeError: out of memory")
    died(ranks, 0, 1, 2)
    verdict = ranks.verdict()
    assert verdict.blamed == [1] and "out of memory" in verdict.reason


def test_a_run_that_has_ended_has_nobody_to_blame(tmp_path):
    ranks = Ranks(tmp_path, 2)
    for rank in (0, 1):
        ranks[rank].to("end")
    died(ranks, 0, 1)
    assert ranks.verdict().blamed == []
    assert "2 at the end of the run, nobody is to blame" in report(tmp_path)


def test_a_folder_without_files_is_told(tmp_path):
    with pytest.raises(UserError, match="no flight recorder files"):
        report(tmp_path)


def test_a_file_that_is_cut_short_is_left_out(tmp_path):
    ranks = Ranks(tmp_path, 2)
    folder = newest_start(tmp_path)
    (folder / "rank_00001.bin").write_bytes(MAGIC)
    assert list(read_ranks(folder)) == [0]
    assert ranks.all  # they map their files until here


def test_more_channels_and_phases_than_there_is_room_for(tmp_path):
    ranks = Ranks(tmp_path, 2)
    recorder = ranks[0]
    for peer in range(700):
        recorder.issue(recorder.channel(1, peer, SEND), SENDS, 1)
    for _ in range(40):
        recorder.enter("step")
    for _ in range(50):
        recorder.leave()
    recorder.enter("save")
    assert read_ranks(newest_start(tmp_path))[0].phases == ("save",)


def test_files_of_old_starts_are_removed_and_those_of_a_refused_one(tmp_path, monkeypatch):
    for number in range(4):
        monkeypatch.setenv("MASTER_PORT", str(number))
        Ranks(tmp_path, 1)
    remove_old_starts(tmp_path)
    assert len([*(tmp_path / FOLDER).iterdir()]) == KEPT_STARTS
    before = newest_start(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "99")
    refused = Ranks(tmp_path, 1)
    assert newest_start(tmp_path) != before
    refused[0].discard()
    assert newest_start(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    recorder = Recorder()
    assert recorder.open(tmp_path / "file", 0, 1) is None
    recorder.enter("step")
    recorder.leave()
