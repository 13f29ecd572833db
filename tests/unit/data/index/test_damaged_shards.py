"""Shards that are no files, whose headers say what is not so, that cannot be read, or change under a run."""

import errno
import os
import random
import tarfile

import pytest

from data.errors import DataError, ReadError, ShardError
from data.index.catalogue import open_catalogue
from data.index.find_shards import find_shards
from data.index.index_file import catalogue_path
from data.index.indexing import build_index
from data.storage import files
from data.storage.reader import ShardReader
from data.storage.tar import walk_tar
from tests.tars import write_tar
from tests.unit.data.helpers import open_index

TEXT = b'{"text": "hello"}'


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Seconds that were waited before another try."""
    waited: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    return waited


def header(name: str = "a.txt", size: int = 5, kind: bytes = b"0", field: bytes | None = None) -> bytes:
    """A ustar header with a right checksum; `field`: the 12 bytes of its size."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    raw = bytearray(info.tobuf(tarfile.USTAR_FORMAT)[:512])
    if field is not None:
        raw[124:136] = field.ljust(12, b"\0")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def shard_of(path, *blocks: bytes):
    """Blocks, each filled up to 512 bytes, and the end mark."""
    path.write_bytes(b"".join(block + bytes(-len(block) % 512) for block in blocks) + bytes(1024))
    return path


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([header(field=b"\xff" * 12), b"hello"], "length is negative"),
        ([header(field=b"-0000001000"), b"hello"], "length is negative"),
        ([header(size=8**11 - 1), b"hello"], "truncated"),
        ([header("L", 1 << 30, b"L"), b"x"], "not a readable"),
        ([header("p", 15, b"x"), b"15 size=999999\n", header(), b"hello"], "truncated"),
        ([header("p", 9, b"x"), b"0 path=a\n", header(), b"hello"], "damaged header"),
        ([header(kind=b"S"), b"hello"], "a sparse file"),
        ([header("a.txt", 0, b"2")], "is a link"),
        ([header("a.txt", 0, b"Z")], r"unknown type \('Z'\)"),
        ([header("L", 2, b"L"), b"n\0"], "not a readable"),
        ([header("L", 2, b"L"), b"n\0"] * 2000, "not a readable"),
    ],
)
def test_headers_that_cannot_be_true_are_named_with_shard_and_byte(tmp_path, blocks, said):
    shard = shard_of(tmp_path / "s.tar", header("ok.txt", 2), b"ok", *blocks)
    with pytest.raises(ShardError, match=rf"s\.tar: .*{said}"):
        build_index(shard)


def test_a_tar_that_ends_within_a_table_of_a_sparse_file_is_named(tmp_path):
    sparse = bytearray(header(kind=b"S"))
    sparse[482] = 1  # the table goes on in the next block
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    (tmp_path / "s.tar").write_bytes(header("ok.txt") + bytes(512) + sparse)
    with pytest.raises(ShardError, match=r"s\.tar: not a readable"):
        build_index(tmp_path / "s.tar")


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path):
    folder = tmp_path / "shards"
    write_tar(folder / "a.tar", [("a.txt", b"x")])
    os.mkfifo(folder / "b.tar")
    (folder / "c.tar").mkdir()
    for name, kind in (("b.tar", "a FIFO"), ("c.tar", "a folder")):
        with pytest.raises(ShardError, match=rf"{name}: is {kind}, not a file"):
            open_catalogue(find_shards(f"{folder}/{name}*"))
        with pytest.raises(ShardError, match=rf"{name}: is {kind}, not a file"):
            ShardReader().read(folder / name, 0, 1, "txt")
    (folder / "d.tar").symlink_to(folder / "gone.tar")
    with pytest.raises(DataError, match=r"d\.tar: cannot look at it"):
        open_index(folder / "d.tar")
    os.mkfifo(catalogue_path(folder / "a.tar"))  # in the place of an index: it is built again
    assert open_index(folder / "a.tar").key(0) == "a" and catalogue_path(folder / "a.tar").is_file()


def test_no_damage_to_headers_gives_anything_but_an_error_of_the_shard(tmp_path):
    """Bytes of headers changed at random, with the checksum put right: each is an error with the shard's name, or a tar
    whose members are inside of it."""
    blocks = [header("L", 150, b"L"), b"n" * 149, header(size=600), bytes(600), header("p", 30, b"x")]
    blocks += [b"30 path=some/name/of/a/member\n", header("c.json", 17), TEXT]
    whole = shard_of(tmp_path / "s.tar", *blocks).read_bytes()
    headers = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
    draw, errors = random.Random(1), 0
    for _ in range(3000):
        raw = bytearray(whole)
        at = draw.choice(headers)
        for _ in range(draw.randrange(1, 4)):
            place = draw.choice([draw.randrange(124, 136), 156, draw.randrange(512), draw.randrange(512, 542)])
            raw[at + place] = draw.choice([0, 0xFF, 0x80, ord("-"), ord("7"), ord("9"), draw.randrange(256)])
        raw[at + 148 : at + 156] = b" " * 8
        raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
        try:
            for _, offset, size in walk_tar(
                tmp_path / "s.tar", lambda length, start, raw=raw: bytes(raw[start : start + length]), len(raw)
            ):
                assert 0 < offset and 0 <= size and offset + size <= len(raw)
        except ShardError as error:
            errors += 1
            assert str(error).startswith(f"{tmp_path / 's.tar'}: ") and str(error).isprintable()
    assert 500 < errors < 3000


def failing(monkeypatch, times: int, number: int, of: str = "pread"):
    """`os.pread` fails `times` times, then works."""
    real, left = getattr(os, of), [times]

    def call(*args):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, of, call)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENXIO])
def test_a_read_is_tried_again_and_then_ends_with_shard_and_byte(tmp_path, monkeypatch, pauses, number):
    shard = write_tar(tmp_path / "s.tar", [("a.txt", b"hello")])
    reader = ShardReader(retries=2)
    with monkeypatch.context() as patch:
        failing(patch, 2, number)
        assert reader.read(shard, 512, 5, "txt") == b"hello"
        assert pauses == [0.5, 1.0]
        failing(patch, 3, number, of="open")
        with pytest.raises(ReadError, match=rf"s\.tar: cannot read 5 bytes at byte 512: .*{errno.errorcode[number]}"):
            ShardReader(retries=2).read(shard, 512, 5, "txt")
    with monkeypatch.context() as patch:
        failing(patch, 99, number)
        with pytest.raises(ReadError, match=r"s\.tar: cannot read .*data\.read_retries"):
            build_index(shard)
    assert len(build_index(shard)) == 1


def test_what_no_waiting_changes_is_not_waited_for(tmp_path, pauses):
    with pytest.raises(ReadError, match="No such file"):
        open_index(tmp_path / "gone.tar")
    assert not pauses


def dated_back(path, found):
    """Give a file the modification time of `found`; its change time has moved on when this is done."""
    while True:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        if os.stat(path).st_ctime_ns != found.st_ctime_ns:
            return


def rolled(shard):
    """The shard with the contents of its members moved on by one, its size and its times of writing as before."""
    found, members = os.stat(shard), []
    with tarfile.open(shard) as tar:
        members = [(one.name, tar.extractfile(one).read()) for one in tar]
    contents = [raw for _, raw in members]
    other = write_tar(
        shard.parent / "other", zip([name for name, _ in members], contents[-1:] + contents, strict=False)
    )
    return other.read_bytes(), found


def test_a_shard_that_is_written_over_in_place_is_noticed_at_the_next_read(tmp_path):
    shard = write_tar(tmp_path / "s.tar", [(f"{at}.txt", b"%d" % at) for at in range(9)])
    index, reader = open_index(shard), ShardReader()
    before = reader.read(shard, 512, 1, "txt", index.version)
    content, found = rolled(shard)
    with open(shard, "r+b") as file:
        file.write(content)
    dated_back(shard, found)
    assert os.stat(shard).st_ino == found.st_ino and before == b"0"
    with pytest.raises(ShardError, match=r"s\.tar: the shard changed .* other content"):
        reader.read(shard, 512, 1, "txt", index.version)
    # The next run does not take the index for that of this shard, nor the shard for that of a checkpoint.
    again = open_index(shard)
    assert again.version.content != index.version.content
    assert [again.key(row) for row in range(9)] == [str(row) for row in range(9)]


def test_a_shard_that_is_cut_under_a_run_is_said_to_have_changed(tmp_path):
    shard = write_tar(tmp_path / "s.tar", [(f"{at}.txt", b"%d" % at) for at in range(9)])
    index, reader = open_index(shard), ShardReader()
    os.truncate(shard, 600)
    with pytest.raises(ShardError, match=r"s\.tar: the shard changed .* Start the run again"):
        reader.read(shard, 4608, 1, "txt", index.version)
    with pytest.raises(ShardError, match=r"only 0 of 1 bytes at byte 4608: .* Copy or write the shard again"):
        reader.read(shard, 4608, 1, "txt")


def test_a_shard_that_is_replaced_is_noticed_after_a_while_and_a_copy_of_it_is_not(tmp_path):
    shard = write_tar(tmp_path / "s.tar", [(f"{at}.txt", b"%d" % at) for at in range(9)])
    now = [0.0]
    index, reader = open_index(shard), ShardReader(clock=lambda: now[0])
    assert reader.read(shard, 512, 1, "txt", index.version) == b"0"
    content, found = rolled(shard)
    for moved, raw in ((10.0, shard.read_bytes()), (20.0, content)):
        (tmp_path / "new").write_bytes(raw)
        dated_back(tmp_path / "new", found)
        os.replace(tmp_path / "new", shard)
        assert reader.read(shard, 512, 1, "txt", index.version) == b"0"  # from the file that is open
        now[0] = moved
        if raw is content:
            with pytest.raises(ShardError, match="changed"):
                reader.read(shard, 512, 1, "txt", index.version)
        else:
            assert reader.read(shard, 512, 1, "txt", index.version) == b"0"
    reader.close()


def test_a_copied_shard_keeps_its_index(tmp_path, monkeypatch):
    shard = write_tar(tmp_path / "s.tar", [("a.txt", b"x")])
    built = open_index(shard)
    dated_back(shard, os.stat(shard))
    monkeypatch.setattr("data.index.indexing.build_index", lambda *args: pytest.fail("built again"))
    for _ in range(2):
        again = open_index(shard)
        assert again.version.content == built.version.content and again.version.ctime_ns > built.version.ctime_ns
    monkeypatch.setattr("data.storage.files._content_hash", lambda *args: pytest.fail("compared again"))
    assert open_index(shard).key(0) == "a"


def test_an_index_with_a_changed_byte_is_built_again(tmp_path, caplog):
    shard = write_tar(tmp_path / "s.tar", [(f"{at}.txt", b"%d" % at) for at in range(9)])
    good = open_index(shard)
    keys, members = [good.key(row) for row in range(9)], [good.members(row) for row in range(9)]
    path = catalogue_path(shard)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    rolled_samples = whole[:start] + whole[start + 24 : start + 240] + whole[start : start + 24] + whole[start + 240 :]
    flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(20, len(whole), 211)]
    for damaged in (rolled_samples, *flips):
        path.write_bytes(damaged)
        index = open_index(shard)
        assert [index.key(row) for row in range(9)] == keys and [index.members(row) for row in range(9)] == members
        assert path.read_bytes() == whole
    assert "damaged (index" in caplog.text
