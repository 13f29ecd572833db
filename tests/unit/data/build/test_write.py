"""Shards that are written: complete and readable, or no file at all."""

import errno
import os
import tarfile

import pytest
import webdataset

from data.storage.tar import tar_bytes, write_shard
from tests.unit.data.helpers import open_index

SIZES = [0, 1, 511, 512, 513, 20_000, (1 << 20) + 513]


def test_samples_are_read_as_they_were_written_and_have_the_same_bytes_each_time(tmp_path):
    contents = [os.urandom(size) for size in SIZES]
    for name in ("in/x.tar", "y.tar"):
        write_shard(tmp_path / name, ([("ü.bin", content), ("copy", content[::-1])] for content in contents))
    assert (tmp_path / "in/x.tar").read_bytes() == (tmp_path / "y.tar").read_bytes()
    samples = list(webdataset.WebDataset(str(tmp_path / "y.tar"), shardshuffle=False))
    assert [(sample["ü.bin"], sample["copy"]) for sample in samples] == [(raw, raw[::-1]) for raw in contents]
    with tarfile.open(tmp_path / "y.tar") as tar:
        assert {(one.mtime, one.uid, one.uname, one.mode) for one in tar} == {(0, 0, "", 0o644)}
    assert len(open_index(tmp_path / "y.tar")) == len(SIZES)


def test_members_keep_their_order_and_names(tmp_path):
    """The order is that of placeholders; webdataset's writer sorts, and drops names with an underscore in front."""
    members = [("right.png", b"1"), ("left.png", b"2"), ("_depth.png", b"3"), ("json", b"{}")]
    write_shard(tmp_path / "x.tar", [members])
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == [f"000000.{extension}" for extension, _ in members]


def test_the_bytes_of_a_member_in_a_shard_are_known(tmp_path):
    write_shard(tmp_path / "x.tar", ([("bin", bytes(size)), ("copy", bytes(size))] for size in SIZES))
    with tarfile.open(tmp_path / "x.tar") as tar:
        *_, last = tar
    assert last.offset + tar_bytes(last.size) == 2 * sum(map(tar_bytes, SIZES))


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_stays_of_a_shard_that_could_not_be_completed(error, tmp_path):
    def samples():
        yield [("txt", b"one")]
        raise error

    with pytest.raises(type(error)):
        write_shard(tmp_path / "x.tar", samples())
    assert not list(tmp_path.iterdir())
