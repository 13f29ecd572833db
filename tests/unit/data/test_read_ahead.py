"""Ranges of files that the system is told of before they are read: those, no others, and only while that pays."""

import os
from collections import Counter

import pytest

from data.pipeline import Batching, DataError, Reader, StepLoader
from data.storage import read_ahead
from data.storage.read_ahead import ReadAhead


@pytest.fixture
def told(monkeypatch):
    """(file's name, first byte, bytes) of what the system was told will be needed."""
    found, advise = [], os.posix_fadvise

    def tell(fd, offset, size, advice):
        if advice == os.POSIX_FADV_WILLNEED:
            found.append((os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2], offset, size))
        advise(fd, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", tell)
    return found


def reads_of(data, monkeypatch):
    """(file's name, first byte, bytes) of what is read."""
    found, read = [], data.reader.read

    def noted(path, offset, size, *more):
        found.append((path.name, offset, size))
        return read(path, offset, size, *more)

    monkeypatch.setattr(data.reader, "read", noted)
    return found


@pytest.mark.parametrize("module", ["language", "images"])
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_what_a_rank_announces_is_what_it_reads(module, dp_rank, dataset, told, monkeypatch):
    data = dataset()
    read = reads_of(data, monkeypatch)
    with StepLoader(data, Batching(4, 4), [Reader(module, dp_rank, 2)], workers=1, limit=6) as steps:
        assert len([*steps]) == 6
    assert read and Counter(told) == Counter(read)
    data.close()


def test_nothing_is_announced_where_files_are_in_memory(dataset, told, monkeypatch):
    data = dataset()
    data.reader.ahead.pays = False
    read = reads_of(data, monkeypatch)
    with StepLoader(data, Batching(4, 4), [Reader("language", 0, 1)], workers=1, limit=3) as steps:
        assert len([*steps]) == 3
    assert len(read) == 12 and not told
    data.close()


def test_a_file_that_is_gone_is_said_by_its_read_alone(dataset, small, told):
    data = dataset(read_retries=0)
    (small / "a-000001.tar").unlink()
    gone, there = ((data.shards[at], 0, 100, data.version(at)) for at in (1, 0))
    data.reader.expect([gone, there])
    assert told == [("a-000000.tar", 0, 100)]
    with pytest.raises(DataError, match=r"a-000001\.tar"):
        data.reader.read(*gone[:3], "json", gone[3])
    data.close()


@pytest.fixture
def in_memory(monkeypatch):
    """Whether bytes are; an error where the file system does not say."""
    state = {"now": True}

    def peek(fd, buffers, offset, flags):
        assert flags == os.RWF_NOWAIT
        if state["now"] is None:
            raise OSError(95, "Operation not supported")
        if not state["now"]:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", peek)
    monkeypatch.setattr(read_ahead, "_LOOKS", 10)
    return state


def test_what_is_in_memory_ends_it_and_what_is_not_begins_it_again(in_memory, tmp_path):
    (tmp_path / "x").write_bytes(bytes(1000))
    ahead = ReadAhead()
    with open(tmp_path / "x", "rb") as file:

        def ten_of(act):
            for _ in range(10):
                act(file.fileno(), 0)

        def announced(fd, offset):
            ahead.announce(fd, offset, 10)

        assert ahead.pays
        ten_of(ahead.reads)
        assert ahead.pays, "what was announced and is there by now says nothing"
        ten_of(announced)
        assert not ahead.pays
        ten_of(ahead.reads)
        assert not ahead.pays
        in_memory["now"] = False
        ten_of(ahead.reads)
        assert ahead.pays
        ten_of(announced)
        assert ahead.pays
        in_memory["now"] = None
        ten_of(announced)
        assert ahead.pays, "where nobody says, it is told"
