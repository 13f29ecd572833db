"""Reads of shards: bytes are counted, few files are open, and errors name the shard."""

import os
import threading

import pytest

from data.errors import ReadError, ShardError
from data.storage.files import ShardVersion, pread_all
from data.storage.reader import ShardReader


def test_reader_counts_bytes_and_bounds_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("data.storage.reader._OPEN_FILES", 2)
    paths = [tmp_path / f"{n}.bin" for n in range(6)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * 100)
    reader = ShardReader()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None

    def work():
        for turn in range(200):
            n = turn % 6
            assert reader.read(paths[n], n, 10, "bin") == bytes([n]) * 10

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(reader.bytes_read) == {"bin": 4 * 200 * 10}
    reader.read(paths[0], 0, 1, "bin")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_reader_errors(tmp_path):
    path = tmp_path / "s.tar"
    path.write_bytes(b"x" * 100)
    reader = ShardReader()
    with pytest.raises(ShardError, match=r"s\.tar: only 20 of 30 bytes at byte 80"):
        reader.read(path, 80, 30, "bin")
    with pytest.raises(ReadError, match="gone: cannot read 1 bytes at byte 0: No such file"):
        reader.read(tmp_path / "gone", 0, 1, "bin")
    with pytest.raises(ShardError, match=r"s\.tar.*changed"):
        ShardReader().read(path, 0, 1, "bin", ShardVersion(100, 1, 1, ""))


def test_short_reads_are_continued_until_the_file_ends(tmp_path, monkeypatch):
    """As Linux gives at most 2 GiB less 4 KiB per call."""
    read, sizes = os.pread, []
    monkeypatch.setattr(os, "pread", lambda fd, size, at: sizes.append(size) or read(fd, min(size, 100), at))
    (tmp_path / "x").write_bytes(bytes(250))
    with open(tmp_path / "x", "rb") as file:
        assert pread_all(file.fileno(), 250, 0) == bytes(250) and pread_all(file.fileno(), 300, 10) == bytes(240)
        assert pread_all(file.fileno(), 10, 400) == b"" and sizes == [250, 150, 50, 300, 200, 100, 60, 10]
