import gzip
import io
import os
import wave

import numpy as np
import pytest
import webdataset

from data.errors import DataError, ShardError
from data.index.find_shards import find_shards
from data.index.index_file import catalogue_path
from data.index.indexing import build_index
from tests.disk_faults import disk_of
from tests.tars import write_tar
from tests.unit.data.helpers import encode_image, open_index

TEXT = b'{"text": "hello"}'


@pytest.fixture
def shard(tmp_path):
    members = [("d/a.jpg", encode_image(30, 20)), ("d/a.json", TEXT), ("d/b.PNG", encode_image(8, 9, "PNG"))]
    return write_tar(tmp_path / "x-000000.tar", [*members, ("d/b.txt", b"a caption")])


def test_rows_keys_and_bytes_agree_with_the_tar(shard):
    index = open_index(shard)
    assert [index.key(row) for row in range(len(index))] == ["d/a", "d/b"]
    raw = shard.read_bytes()
    (image, record), (second, caption) = index.members(0), index.members(1)
    assert raw[record.offset : record.offset + record.size] == TEXT
    assert raw[caption.offset : caption.offset + caption.size] == b"a caption"
    assert (image.extension, image.kind, image.height, image.width) == ("jpg", "image", 30, 20)
    assert (second.extension, second.height, second.width) == ("png", 8, 9)
    assert [index.record(row) for row in (0, 1)] == [1, 1]
    assert [index.bad_reason(row) for row in (0, 1)] == [None, None]


def test_keys_and_grouping_are_those_of_webdataset(tmp_path):
    names = ["img.2024.01.jpg", "img.2024.01.json", "p/q.r.txt", "p/q.s.json", "README", ".hidden.txt", "__meta__.json"]
    names += ["dir.with.dots/k.txt", "k.txt"]
    shard = write_tar(tmp_path / "s.tar", [(name, TEXT) for name in names])
    index = build_index(shard)
    ours = [(index.key(row), sorted(member.extension for member in index.members(row))) for row in range(len(index))]
    theirs = [
        (sample["__key__"], sorted(name for name in sample if not name.startswith("__")))
        for sample in webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False)
    ]
    assert ours == theirs
    assert ours[0] == ("img", ["2024.01.jpg", "2024.01.json"])


def test_long_names_and_empty_members(tmp_path):
    import tarfile

    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{form}.tar"
        with tarfile.open(path, "w", format=form) as tar:
            for name, raw in [("n" * 150 + "é.txt", b""), ("b.txt", b"x")]:
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
            folder = tarfile.TarInfo("folder")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
        index = build_index(path)
        assert [index.key(row) for row in range(len(index))] == ["n" * 150 + "é", "b"]


def test_every_truncation_is_found(shard):
    whole = shard.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # end of the last member
    for length in [*range(0, end + 1024, 256), end, end + 1023]:
        shard.write_bytes(whole[:length])
        with pytest.raises(ShardError, match=f"x-000000.tar.*{length}|{length}.*x-000000.tar"):
            build_index(shard)
    shard.write_bytes(whole[: end + 1024])
    assert len(build_index(shard)) == 2


def test_a_damaged_header_is_found_wherever_it_stands(shard):
    whole = shard.read_bytes()
    headers = [member.offset - 512 for row in (0, 1) for member in build_index(shard).members(row)]
    for at in headers:
        for patch in (b"\xff" * 32, b"\0" * 512):
            shard.write_bytes(whole[:at] + patch + whole[at + len(patch) :])
            with pytest.raises(ShardError, match="again"):
                build_index(shard)


def test_compressed_shards_are_refused_with_the_remedy(shard, tmp_path):
    packed = tmp_path / "y.tar.gz"
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    for attempt in (lambda: find_shards(str(packed)), lambda: build_index(packed)):
        with pytest.raises(ShardError, match="gunzip"):
            attempt()
    disguised = tmp_path / "z.tar"
    disguised.write_bytes(packed.read_bytes())
    with pytest.raises(ShardError, match="not a readable uncompressed tar"):
        build_index(disguised)


def test_compressed_shards_beside_tars_are_never_left_out(shard, tmp_path):
    (tmp_path / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    assert [*find_shards(str(shard.parent))] == [shard]  # which is what the other holds
    for name in ("y.tar.gz", "z.TGZ"):
        (tmp_path / name).write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(ShardError, match=r"2 compressed tars, such as y\.tar\.gz, would be left out"):
        find_shards(str(shard.parent))
    assert [*find_shards(str(shard.parent / "*.tar"))] == [shard]


def test_saved_index_is_used_until_the_shard_changes(shard, monkeypatch):
    first = open_index(shard)
    assert catalogue_path(shard).exists()
    with monkeypatch.context() as patch:
        patch.setattr("data.index.indexing.build_index", lambda *args: pytest.fail("built again"))
        again = open_index(shard)
    assert again.members(1) == first.members(1) and again.key(1) == first.key(1)
    write_tar(shard, [("new.txt", b"new")])
    assert [open_index(shard).key(0), len(open_index(shard))] == ["new", 1]
    stat = os.stat(shard)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert open_index(shard).version.mtime_ns == stat.st_mtime_ns + 1


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json\n", None])
def test_a_damaged_index_is_built_again(shard, damage):
    open_index(shard)
    path = catalogue_path(shard)
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    assert open_index(shard).key(1) == "d/b"


def test_an_index_that_is_replaced_while_it_is_read_stays_the_one_that_was_checked(shard, monkeypatch):
    members, memmap = open_index(shard).members(1), np.memmap

    def late(file, **options):
        catalogue_path(shard).unlink()
        catalogue_path(shard).write_bytes(b"{}")
        return memmap(file, **options)

    monkeypatch.setattr(np, "memmap", late)
    assert open_index(shard).members(1) == members


def test_cache_dir_keeps_equal_names_apart_and_the_folder_clean(tmp_path):
    cache = tmp_path / "cache"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "s.tar", [(f"{name}.txt", b"x")])
    keys = [open_index(tmp_path / name / "s.tar", cache).key(0) for name in ("one", "two", "one")]
    assert keys == ["one", "two", "one"]
    assert len(list(cache.iterdir())) == 2 and os.listdir(tmp_path / "one") == ["s.tar"]


def test_an_index_is_for_every_reader_of_the_shards(shard):
    before = os.umask(0o077)
    try:
        open_index(shard)
    finally:
        os.umask(before)
    assert catalogue_path(shard).stat().st_mode & 0o777 == 0o644


def test_a_cache_that_cannot_be_written_is_named_with_its_key(shard, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cannot write the index .*file.*Set data\.cache_dir"):
        open_index(shard, tmp_path / "file" / "cache")
    full = tmp_path / "full"
    full.mkdir()
    with disk_of("4k", full), pytest.raises(DataError, match=r"No space left .*Set data\.cache_dir .* free space"):
        (full / "file").write_bytes(bytes(4096))
        open_index(shard, full)


def test_samples_without_a_usable_record_are_bad(tmp_path):
    names = ["a.jpg", "b.json", "b.txt", "c.1.json", "c.2.json", "d.txt", "d.txt", "e.JSON", "e.jpg"]
    index = build_index(write_tar(tmp_path / "f.tar", [(name, TEXT) for name in names]))
    reasons = {index.key(row): index.bad_reason(row) for row in range(len(index))}
    assert "no .json and no .txt" in reasons["a"] and ".jpg" in reasons["a"]
    assert reasons["b"] is None and reasons["e"] is None
    assert "first dot" in reasons["c"]
    assert "2 times" in reasons["d"]
    assert index.members(1)[index.record(1)].extension == "json"


def test_images_without_a_header_and_audio_are_measured(tmp_path):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as clip:
        clip.setparams((2, 2, 8000, 0, "NONE", ""))
        clip.writeframes(np.zeros((123, 2), dtype=np.int16).tobytes())
    members = [("a.jpg", b"broken"), ("a.wav", buffer.getvalue()), ("a.flac", b"broken"), ("a.txt", b"x")]
    image, clip, broken, _ = build_index(write_tar(tmp_path / "m.tar", members)).members(0)
    assert (image.height, image.width) == (0, 0)
    assert (clip.kind, clip.frames, clip.rate) == ("audio", 123, 8000)
    assert (broken.frames, broken.rate) == (0, 0)


def test_media_keep_the_order_of_the_tar(tmp_path):
    members = [("a.right.jpg", encode_image(8, 9)), ("a.left.jpg", encode_image(10, 11)), ("a.json", TEXT)]
    index = build_index(write_tar(tmp_path / "s.tar", members))
    assert [member.extension for member in index.members(0)] == ["right.jpg", "left.jpg", "json"]
    assert [member.height for member in index.members(0)] == [8, 10, 0] and index.record(0) == 2


def test_find_shards(tmp_path, monkeypatch):
    for number in range(3):
        write_tar(tmp_path / f"x-{number:06d}.tar", [("k.txt", b"x")])
    paths = [tmp_path / f"x-{number:06d}.tar" for number in range(3)]
    assert find_shards(tmp_path) == find_shards(str(tmp_path)) == find_shards(f"{tmp_path}/x-*.tar") == paths
    assert find_shards(f"{tmp_path}/x-{{000001..000002}}.tar") == paths[1:]
    assert find_shards(f"{tmp_path}/x-{{000002,000000}}.tar, {paths[1]}") == [paths[2], paths[0], paths[1]]
    assert find_shards([paths[1], str(paths[0])]) == [paths[1], paths[0]]
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in find_shards("x-*.tar")] == [path.name for path in paths]


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("nowhere", "nowhere"),
        ("y-*.tar", "y-"),
        ("x-{000002..000003}.tar", "x-000003.tar"),
        ("", "empty"),
        ("empty", "no \\*.tar"),
        ("x-{000000.tar", "x-"),
        ("x-{1}", "no such file"),
    ],
)
def test_find_shards_names_the_key_and_what_was_sought(tmp_path, monkeypatch, pattern, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_tar(tmp_path / "x-000002.tar", [("k.txt", b"x")])
    with pytest.raises(DataError, match=rf"data\.shards.*{named}"):
        find_shards(pattern)
