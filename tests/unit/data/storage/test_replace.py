"""A file is replaced whole or not at all, also by several writers at once."""

import multiprocessing
import os
import threading

import pytest

from data.storage.files import replacing
from tests.hang import HANG_SECONDS


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["f"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "nowhere" / "f"):
        pass


@pytest.mark.parametrize(("mode", "found"), [(None, 0o640), (0o644, 0o644)])
def test_permissions_are_those_of_the_umask_or_as_given(tmp_path, mode, found):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "f", mode=mode):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == found


def write_slowly(path, number, barrier):
    """One writer of several: all files are open before any is whole."""
    with replacing(path) as file:
        barrier.wait(timeout=HANG_SECONDS)
        for _ in range(100):
            file.write(bytes([number]) * 1000)
        barrier.wait(timeout=HANG_SECONDS)


def test_threads_and_processes_may_replace_one_file_at_once(tmp_path):
    path, spawn = tmp_path / "f", multiprocessing.get_context("spawn")
    for barrier, make in ((threading.Barrier(8), threading.Thread), (spawn.Barrier(4), spawn.Process)):
        writers = [make(target=write_slowly, args=(path, number, barrier)) for number in range(barrier.parties)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert all(getattr(writer, "exitcode", 0) == 0 for writer in writers)
        raw = path.read_bytes()
        assert len(raw) == 100_000 and len(set(raw)) == 1, "one writer's file, whole"
        assert os.listdir(tmp_path) == ["f"]
