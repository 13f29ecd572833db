"""Tars that are written: the bytes of `tarfile`'s, whatever the sizes, or no file at all."""

import io
import os
import tarfile

from data.storage.write import shard_bytes, shard_file, tar_bytes, write_shard

SIZES = [0, 1, 511, 512, 513, 20_000, (1 << 20) - 512, 1 << 20, (1 << 20) + 513, 3_000_001]


def plain_tar(members):
    """What `tarfile` writes, with the shortest end."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        end = tar.offset
    return file.getvalue()[:end] + bytes(1024)


def test_members_have_the_bytes_of_plain_tars(tmp_path):
    contents = [os.urandom(size) for size in SIZES]
    expected = plain_tar([(f"{at:06d}.{end}", one) for at, one in enumerate(contents, 7) for end in ("ü.bin", "copy")])
    with shard_file(tmp_path / "in" / "x.tar") as shard:
        for row, content in enumerate(contents, 7):
            (tmp_path / "source").write_bytes(b"12345" + content + b"behind")
            shard.add(row, "ü.bin", content)
            with open(tmp_path / "source", "rb") as file:
                assert shard.copy(row, "copy", file.fileno(), 5, len(content))
    assert (tmp_path / "in" / "x.tar").read_bytes() == expected and len(expected) == shard_bytes(2 * tar_bytes(SIZES))
    write_shard(tmp_path / "y.tar", [[("ü.bin", one), ("copy", one)] for one in contents], 7)
    assert (tmp_path / "y.tar").read_bytes() == expected


def test_a_system_that_takes_and_gives_few_bytes_at_a_call(tmp_path, monkeypatch):
    whole, few = os.preadv, []

    class Slow(io.FileIO):
        def write(self, content):
            few.append(len(content))
            return super().write(content[:70_000])

    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:9000]], at))
    content = os.urandom(1_500_000)
    opened = type(tmp_path).open
    monkeypatch.setattr(type(tmp_path), "open", lambda path, mode, *_: Slow(path, mode.replace("b", "")))
    with shard_file(tmp_path / "x.tar") as shard:
        with open(tmp_path / "source", "wb+", buffering=0) as file:
            file.write(content)
            assert shard.copy(0, "bin", file.fileno(), 0, len(content))
            assert not shard.copy(1, "bin", file.fileno(), 10, len(content))
        shard.add(2, "bin", content)
    monkeypatch.setattr(type(tmp_path), "open", opened)
    raw = (tmp_path / "x.tar").read_bytes()
    assert raw.startswith(plain_tar([("000000.bin", content)])[:-1024]) and content in raw[1_500_000 + 512 :]
    assert len(few) > 20
