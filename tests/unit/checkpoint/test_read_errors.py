"""An error of the file system is no damage: a read is tried again, and then ends the start and moves nothing."""

import errno
import os
from pathlib import Path

import pytest
import torch

from data.storage import files as retry
from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.damage import DamagedCheckpoint, damage_in, damage_named
from mimo_train.checkpoint.format import files, read
from mimo_train.checkpoint.format.files import RETRIES, Damage
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank
from mimo_train.config.errors import UserError

KEY = Key("language", "weight", WEIGHT)
REMOVED = "was removed while it was read, as a run removes its old ones: start again"
PASSING = [errno.EIO, errno.ESTALE, errno.EMFILE]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0)
    folder = folder_changes.begin(tmp_path, 4, False, 0)
    write_rank(folder, 0, [Part(KEY, Span.of_whole((8,)), torch.ones(8), True)])
    complete(folder, 1, {folders.RECORD: folders.record_text({"step": 4})})
    return folder


@pytest.fixture
def fails(monkeypatch):
    """Makes a function of an object fail for so many calls; returns the list of its calls."""

    def make(owner, name: str, code: int, times: int) -> list:
        function, calls = getattr(owner, name), []

        def call(*arguments, **kwargs):
            calls.append(arguments)
            if len(calls) <= times:
                raise OSError(code, os.strerror(code))
            return function(*arguments, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return calls

    return make


def refused(folder: Path, work) -> None:
    with pytest.raises(UserError, match=f"^checkpoint {folder} cannot be read .* mend that") as raised:
        work()
    assert not damage_in(folder, raised.value)


@pytest.mark.parametrize("code", PASSING)
@pytest.mark.parametrize(("owner", "name"), [(Path, "stat"), (files, "open_file")])
def test_an_error_that_passes_is_passed_over(code, owner, name, folder, fails):
    fails(owner, name, code, RETRIES)
    folders.require_complete(folder)
    assert folders.read_record(folder)["step"] == 4


@pytest.mark.parametrize("code", [*PASSING, errno.EACCES])
def test_an_error_that_stays_is_no_damage(code, folder, fails):
    run_dir = folder.parents[1]
    fails(files, "open_file", code, 99)
    refused(folder, lambda: folders.read_record(folder))
    refused(folder, lambda: folders.newest_readable(run_dir))
    fails(Path, "stat", code, 999)
    refused(folder, lambda: folders.require_complete(folder))


def test_a_read_is_repeated_with_a_new_handle(folder, fails):
    opened, reader = fails(read, "open_file", errno.EMFILE, 1), Reader(folder)
    fails(read.os, "preadv", errno.ESTALE, 1)
    assert reader.whole(KEY).tolist() == [1.0] * 8
    assert len(opened) == 3

    fails(read.os, "preadv", errno.EIO, 99)

    def read_again() -> None:
        with damage_named(folder):
            Reader(folder).whole(KEY)

    refused(folder, read_again)


def test_a_file_that_is_gone_is_damage(folder):
    reader = Reader(folder)
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(Damage, match=r"rank_00000.safetensors is missing"):
        reader.whole(KEY)
    with pytest.raises(DamagedCheckpoint), damage_named(folder):
        raise FileNotFoundError(errno.ENOENT, "gone")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_named_and_not_taken_for_an_empty_one(code, folder, fails):
    """As an error of users, which all ranks then end with; a run that saw no checkpoint would begin anew."""
    run_dir = folder.parents[1]
    calls = (
        lambda: folders.newest_first(run_dir),
        lambda: folders.newest_readable(run_dir),
        lambda: folders.chosen(run_dir / "other", str(run_dir)),
        lambda: folders.in_folder(run_dir, "checkpoint.weights"),
    )
    words = f"^the checkpoints in {run_dir}/checkpoints cannot be looked at .*mend that"
    fails(os, "listdir", code, 999)
    for call in calls:
        with pytest.raises(UserError, match=words):
            call()
    with pytest.raises(OSError):  # inside a save it is one that has failed
        folder_changes.remove_unfinished(run_dir)


@pytest.mark.parametrize("before", ["the marker", "the folder"])
def test_a_checkpoint_that_its_run_removes_is_not_called_damaged(folder, before):
    """Who exports from a run that goes on is not told to remove the folder."""
    if before == "the folder":
        folder_changes.remove(folder)
    else:
        (folder / files.PARTIAL).touch()
        (folder / files.COMPLETE).unlink()
    with pytest.raises(UserError, match=REMOVED) as raised:
        folders.read_record(folder)
    assert not damage_in(folder, raised.value)
    with pytest.raises(UserError, match=REMOVED), damage_named(folder):
        Reader(folder)


def test_a_checkpoint_without_its_marker_that_stays_is_damaged(folder):
    (folder / files.COMPLETE).unlink()
    with pytest.raises(DamagedCheckpoint, match="COMPLETE is missing"):
        folders.read_record(folder)
