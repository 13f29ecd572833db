"""The file of a catalogue: built once, gone on with, mended in parts, and small in memory."""

import errno
import fcntl
import os
import threading

import numpy as np
import pytest

from data.errors import DataError, ShardError
from data.index.catalogue import open_catalogue
from data.index.find_shards import find_shards
from data.index.index_file import FolderFile, catalogue_path, load_file, write_file
from data.index.indexing import build_index
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, open_index


@pytest.fixture
def folder(tmp_path):
    """Five shards of one to five samples."""
    for n in range(5):
        members = []
        for at in range(n + 1):
            members += [
                (f"{n}{at}.png", encode_image(8 + n, 9 + at, "PNG")),
                (f"{n}{at}.json", chat("<image>?", "!")),
            ]
        write_tar(tmp_path / "shards" / f"s-{n}.tar", members)
    return tmp_path / "shards"


@pytest.fixture
def built(monkeypatch):
    """Names of the shards that are indexed."""
    names = []

    def build(shard, retries=0):
        names.append(shard.name)
        return build_index(shard, retries)

    monkeypatch.setattr("data.index.indexing.build_index", build)
    return names


def said(catalogue, shards):
    """All that a catalogue says."""
    return [
        (index.key(row), index.members(row), index.record(row), index.bad_reason(row), index.version.content)
        for index in (catalogue.index(shard) for shard in range(len(shards)))
        for row in range(len(index))
    ]


def test_one_file_has_all_shards_and_rows_of_any_at_once(folder, built):
    shards = find_shards(folder)
    catalogue = open_catalogue(shards)
    assert sorted(os.listdir(folder)) == sorted([*(path.name for path in shards), "shards.mimo-catalogue"])
    assert said(catalogue, shards) == [one for path in shards for one in said(open_catalogue([path]), [path])]
    assert len(built) == 5
    # Another order of them, and some twice.
    places = [shards[number] for number in (4, 0, 2, 4)]
    some = open_catalogue(places)
    of, at = np.array([3, 0, 1, 2, 0, 3]), np.array([1, 4, 0, 2, 1, 4])
    rows = some.rows(of, at)
    for number, (shard, row) in enumerate(zip(of.tolist(), at.tolist(), strict=True)):
        index = some.index(shard)
        own = rows.members[rows.firsts[number] : rows.firsts[number + 1]]
        for member, found in zip(index.members(row), own, strict=True):
            assert (found["offset"], found["size"]) == (member.offset, member.size)
            assert (rows.names[found["code"]], rows.kinds[found["code"]]) == (member.extension, member.kind)
            assert member.kind == "other" or (found["first"], found["second"]) == member.extent
        assert rows.samples["record"][number] == index.record(row)
    assert len(built) == 5


def test_one_changed_shard_is_built_alone_and_the_others_stay(folder, built):
    shards = find_shards(folder)
    open_catalogue(shards)
    before = load_file(catalogue_path(shards[0]), "index")
    bodies = [bytes(before.part(number).body) for number in range(5)]
    del built[:]
    write_tar(shards[2], [("x.txt", b"x")])
    assert open_catalogue(shards).index(2).key(0) == "x" and built == ["s-2.tar"]
    after = load_file(catalogue_path(shards[0]), "index")
    assert [bytes(after.part(n).body) == bodies[n] for n in range(5)] == [True, True, False, True, True]
    # Asked for two of them, the file keeps the others, but not one that is gone.
    shards[4].unlink()
    write_tar(shards[3], [("y.txt", b"y")])
    open_catalogue(shards[2:4])
    assert built == ["s-2.tar", "s-3.tar"]
    assert sorted(load_file(catalogue_path(shards[0]), "index").row_of) == [f"s-{n}.tar" for n in range(4)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_after_a_kill_the_rest_is_built_and_the_file_is_that_of_one_go(folder, built, monkeypatch, is_killed):
    """What was saved until then is kept: all of it at an interrupt, and what was due before at a kill."""
    shards = find_shards(folder)

    def stopped(shard, retries=0):
        if shard.name == "s-3.tar":
            if is_killed:
                monkeypatch.setattr(FolderFile, "save", lambda *arguments: None)
            raise KeyboardInterrupt
        return build_index(shard, retries)

    with monkeypatch.context() as patch:
        patch.setattr("data.index.indexing.build_index", stopped)
        if is_killed:
            patch.setattr("data.index.index_file.SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            open_catalogue(shards)
    monkeypatch.undo()
    names = []
    monkeypatch.setattr(
        "data.index.indexing.build_index", lambda shard, r=0: names.append(shard.name) or build_index(shard, r)
    )
    write_tar(shards[1], [("other.txt", b"other")])
    open_catalogue(shards)
    assert names == ["s-1.tar", "s-3.tar", "s-4.tar"] and not [*folder.glob("*.lock")]
    mended = catalogue_path(shards[0]).read_bytes()
    catalogue_path(shards[0]).unlink()
    open_catalogue(shards)
    assert catalogue_path(shards[0]).read_bytes() == mended


def test_those_that_ask_at_once_build_it_once(folder, built):
    shards, found = find_shards(folder), []
    threads = [threading.Thread(target=lambda: found.append(said(open_catalogue(shards), shards))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(one == found[0] for one in found) and sorted(built) == [p.name for p in shards]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked_each_builds_its_own(folder, built, monkeypatch, code):
    def no_locks(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    shards = find_shards(folder)
    assert len(open_catalogue(shards)) == 5 and len(open_catalogue(shards)) == 5 and len(built) == 5
    assert {path.suffix for path in folder.iterdir() if path.stat().st_size} == {".tar", ".mimo-catalogue"}


def test_a_damaged_shard_leaves_the_others_in_the_file(folder, built):
    shards = find_shards(folder)
    shards[2].write_bytes(shards[2].read_bytes()[:5000])
    with pytest.raises(ShardError, match=r"s-2\.tar.*truncated"):
        open_catalogue(shards)
    catalogue = open_catalogue(shards, strict=False)
    assert list(catalogue.errors) == [2] and len(catalogue.index(4)) == 5 and catalogue.counts[2] == 0
    with pytest.raises(ShardError, match="truncated"):
        catalogue.index(2)
    assert built.count("s-0.tar") == built.count("s-4.tar") == 1
    assert not [*folder.glob("*.lock")]


def test_a_user_without_a_home_folder_is_told_the_key(folder, monkeypatch):
    def nobody(number):
        raise KeyError(number)

    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for cache_dir in (None, "~/index"):
        with pytest.raises(DataError, match=r"data\.cache_dir: .* no home folder"):
            open_catalogue(find_shards(folder), cache_dir)


def test_a_shard_of_large_numbers_is_told_as_it_is(tmp_path):
    """A sample of many members, and one without a record."""
    members = [(f"a.{n}.bin", b"x") for n in range(40_000)] + [("a.json", chat("?", "!")), ("b.jpg", b"x")]
    shard = write_tar(tmp_path / "s.tar", members)
    index = open_index(shard)
    assert index.record(0) == 40_000 and index.record(1) is None and "no .json" in index.bad_reason(1)
    assert [index.key(row) for row in range(2)] == ["a", "b"] and len(index.members(0)) == 40_001


def test_a_start_looks_at_each_shard_once(folder, monkeypatch):
    open_catalogue(find_shards(folder))
    looked, whole = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: looked.append(str(path)) or whole(path, **how))
    shards = find_shards(folder)
    catalogue = open_catalogue(shards)
    of_shards = [path for path in looked if path.endswith(".tar")]
    assert of_shards == [str(folder / f"s-{n}.tar") for n in range(5)]
    assert catalogue.counts.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lost", [2, 3])
def test_an_index_that_others_write_over_is_there_as_soon_as_one_attempt_succeeds(folder, built, monkeypatch, lost):
    """Each loses what was written before, as where files cannot be locked; the third attempt is the last."""
    shards, writes = find_shards(folder), []

    def write(path, *arguments):
        writes.append(path)
        if len(writes) > lost:
            write_file(path, *arguments)

    monkeypatch.setattr("data.index.index_file.write_file", write)
    if lost == 3:
        with pytest.raises(DataError, match="other processes write this index too"):
            open_catalogue(shards)
    else:
        assert open_catalogue(shards).index(3).key(1) == "31"
    assert len(writes) == 3 and len(built) == 3 * len(shards)
