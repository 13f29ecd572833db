"""A checkpoint that is written over another one of its step: a kill or an error at any call leaves one of the two; no
name is on the disk before what it stands for; large files are flushed bit by bit."""

import errno
import os
from itertools import groupby
from pathlib import Path

import pytest
import torch

from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.folder_changes import require_room
from mimo_train.checkpoint.format import files
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import NotFinite, Part, complete, write_rank
from mimo_train.flight.recorder import RECORDER
from tests.disk_faults import DiskCalls

KEY, RANKS = Key("language", "weight", WEIGHT), 2


def save(run_dir: Path, value: float) -> None:
    """A checkpoint of step 4, as its two ranks write it one after the other."""
    folder = folder_changes.begin(run_dir, 4, False, 0)
    for rank in range(RANKS):
        part = Part(KEY, Span.of_whole((8,)).part(4 * rank, 4 * rank + 4), torch.full((4,), value), True)
        write_rank(folder, rank, [part])
    complete(folder, RANKS, {folders.RECORD: folders.record_text({"step": 4})})
    folder_changes.remove_old(run_dir, 0)


def left(run_dir: Path) -> float:
    """The value in the newest checkpoint, which a new start finds."""
    folder = folders.newest(run_dir)
    assert folders.newest_first(run_dir)[0] == folder, "nothing that a run has left is taken for a damaged one"
    assert folders.read_record(folder, "step") == {"step": 4}
    (value,) = set(Reader(folder).whole(KEY).tolist())
    return value


@pytest.fixture(autouse=True)
def real_calls(monkeypatch):
    monkeypatch.setattr(files, "os", os)


def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(tmp_path):
    calls = DiskCalls().install()
    save(tmp_path, 0.0)
    before = calls.count
    save(tmp_path, 0.0)
    seen = []
    for number in range(calls.count - before):
        files.os = os
        child = os.fork()
        if child == 0:
            DiskCalls(number, lambda: os._exit(9)).install()
            save(tmp_path, number + 1.0)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        seen.append(left(tmp_path) - number)
    assert seen[0] <= 0, "the old one before anything of the new one is written"
    assert seen[-1] == 1, "the new one at the last call"
    save(tmp_path, 99.0)
    assert left(tmp_path) == 99.0
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 1, "nothing is left behind"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_at_any_call_is_raised_and_leaves_a_whole_one(code, tmp_path):
    def fail():
        raise OSError(code, os.strerror(code))

    calls = DiskCalls().install()
    save(tmp_path, 0.0)
    before = calls.count
    save(tmp_path, 0.0)
    for number in range(calls.count - before):
        DiskCalls(number, fail).install()
        with pytest.raises(OSError) as raised:
            save(tmp_path, number + 1.0)
        assert raised.value.errno == code
        assert left(tmp_path) in (number + 1.0, 0.0, *range(1, number + 1))
    files.os = os
    save(tmp_path, 99.0)
    assert left(tmp_path) == 99.0


def test_values_that_are_not_finite_are_not_written(tmp_path):
    """Neither in the first block of a tensor nor in a later one; and all tensors are named, those of others are not."""
    names = ("fine", "first", "last", "moment")
    for bad in (float("nan"), float("inf")):
        values = {name: torch.zeros(1_500_000) for name in names}
        values["first"][0] = values["last"][-1] = values["moment"][7] = bad
        parts = [
            Part(Key("language", name, WEIGHT), Span.of_whole((1_500_000,)), value, name != "moment")
            for name, value in values.items()
        ]
        with pytest.raises(NotFinite, match="^language first, language last$"):
            write_rank(tmp_path, 0, parts)
        assert not any(tmp_path.iterdir())


def test_room_is_looked_at_beforehand(tmp_path):
    require_room(tmp_path, 1)
    with pytest.raises(OSError, match=r"a checkpoint takes 1e\+09 GB and .* GB are free") as raised:
        require_room(tmp_path, 10**18)
    assert raised.value.errno == errno.ENOSPC


def test_multiples_stay_beside_the_newest(tmp_path):
    from tests.records import write_record

    for step in range(1, 10):
        folder = folders.step_folder(tmp_path, step)
        folder.mkdir(parents=True)
        write_record(folder, {"step": step})
    folder_changes.remove_old(tmp_path, 2, keep_every=4)
    assert [int(folder.name[5:]) for folder in folders.complete(tmp_path)] == [4, 8, 9]
    folder_changes.remove_old(tmp_path, 1)
    assert [int(folder.name[5:]) for folder in folders.complete(tmp_path)] == [9]


@pytest.mark.parametrize("parts", [[bytes(100)], [bytes(10)] * 10, [bytes(33)] * 3])
def test_a_large_file_is_flushed_bit_by_bit_and_each_bit_is_progress(tmp_path, monkeypatch, parts):
    monkeypatch.setattr(files, "FLUSHED", 20)
    flushes, before = [], RECORDER.events
    monkeypatch.setattr(files.os, "fdatasync", flushes.append)
    size = sum(map(len, parts))
    assert files.write_file(tmp_path / "file", parts) == size
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert 2 < len(flushes) <= 5
    assert RECORDER.events - before == len(flushes) + 1


def test_a_disk_that_fails_meanwhile_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FLUSHED", 20)

    def fails(_file: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(files.os, "fdatasync", fails)
    with pytest.raises(OSError, match="no space"):
        files.write_file(tmp_path / "file", [bytes(100)])
    assert not (tmp_path / "file").exists()


class Calls:
    """Stands for the module `os` where checkpoints are written, and notes what is written, flushed and renamed."""

    def __init__(self):
        self.done: list[str] = []
        self._names: dict[int, str] = {}

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, *arguments):
        file = os.open(path, *arguments)
        self._names[file] = Path(path).name
        return file

    def write(self, file, data):
        self.done.append(f"write {self._names[file]}")
        return os.write(file, data)

    def fsync(self, file):
        self.done.append(f"flush {self._names[file]}")
        os.fsync(file)

    def rename(self, old, new):
        self.done.append(f"rename {Path(old).name} {Path(new).name}")
        os.rename(old, new)


def test_no_name_is_on_the_disk_before_what_it_stands_for(tmp_path, monkeypatch):
    """Folders that are new, with their names in those above; each file; the names in the folder; its own name, in the
    folder above; then the marker, under its name when it is there."""
    calls, run_dir = Calls(), tmp_path / "runs" / "one"
    monkeypatch.setattr(files, "os", calls)

    def save() -> list[str]:
        calls.done.clear()
        folder = folder_changes.begin(run_dir, 4, False, 100)
        for rank in range(2):
            part = Part(Key("language", str(rank), WEIGHT), Span.of_whole((3,)), torch.zeros(3))
            write_rank(folder, rank, [part])
        complete(folder, 2, {folders.RECORD: folders.record_text({"step": 4})})
        return [what for what, _ in groupby(calls.done)]

    above = [f"flush {folder.name}" for folder in (run_dir, *run_dir.parents)]
    written = ["rank_00000.safetensors", "rank_00000.json", "rank_00001.safetensors", "rank_00001.json"]
    written += ["index.json", "run.json"]
    each = [f"{what} {name}" for name in written for what in ("write", "flush")]
    end = ["write COMPLETE.new", "flush COMPLETE.new", "rename COMPLETE.new COMPLETE"]
    for name in ("step_00000004", "step_00000004.002"):
        calls.done.clear()
        done = save()
        kept = [what for what in above if what in done]  # a folder on another file system is not flushed
        assert kept[:3] == (above[:3] if name == "step_00000004" else [])
        middle = [f"flush {name}", "flush checkpoints"]
        assert done == [*kept, "flush PARTIAL", *each, *middle, *end, f"flush {name}"]
