"""What is on the disk when: large files bit by bit, which is progress, and the parts of a checkpoint in an order in
which no name is there before what it stands for."""

import os
from itertools import groupby
from pathlib import Path

import pytest
import torch

from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.format import files as durable
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank
from mimo_train.flight.recorder import RECORDER


@pytest.mark.parametrize("parts", [[bytes(100)], [bytes(10)] * 10, [bytes(33)] * 3])
def test_a_large_file_is_flushed_bit_by_bit_and_each_bit_is_progress(tmp_path, monkeypatch, parts):
    monkeypatch.setattr(durable, "FLUSHED", 20)
    flushes, before = [], RECORDER.events
    monkeypatch.setattr(durable.os, "fdatasync", flushes.append)
    size = sum(map(len, parts))
    assert durable.write_file(tmp_path / "file", parts) == size
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert 2 < len(flushes) <= 5
    assert RECORDER.events - before == len(flushes) + 1


def test_a_disk_that_fails_meanwhile_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "FLUSHED", 20)

    def fails(_file: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(durable.os, "fdatasync", fails)
    with pytest.raises(OSError, match="no space"):
        durable.write_file(tmp_path / "file", [bytes(100)])
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
    monkeypatch.setattr(durable, "os", calls)

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
    files = [f"{what} {name}" for name in written for what in ("write", "flush")]
    end = ["write COMPLETE.new", "flush COMPLETE.new", "rename COMPLETE.new COMPLETE"]
    for name in ("step_00000004", "step_00000004.002"):
        calls.done.clear()
        done = save()
        kept = [what for what in above if what in done]  # a folder on another file system is not flushed
        assert kept[:3] == (above[:3] if name == "step_00000004" else [])
        middle = [f"flush {name}", "flush checkpoints"]
        assert done == [*kept, "flush PARTIAL", *files, *middle, *end, f"flush {name}"]
