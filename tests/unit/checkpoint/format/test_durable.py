"""Large files reach the disk bit by bit, which is progress."""

import pytest

from mimo_train.checkpoint.format import durable
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
