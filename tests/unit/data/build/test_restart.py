"""Builds of shards that are shuffled, killed, or whose source changes or is large: whole and the same, or an error."""

import json
import os
import signal
import subprocess
import sys

import pytest

from data.build.build import Settings
from data.errors import DataError
from data.index.find_shards import find_shards
from tests.tars import write_tar
from tests.unit.data.build.helpers import (
    RECORDS,
    ROOT,
    build,
    found,
    image,
    media_folder,
    written,
)
from tests.unit.data.helpers import open_index


@pytest.fixture
def media(tmp_path):
    return media_folder(tmp_path)


def many(tmp_path, samples=40):
    """Three tars; the n-th sample has the number n and n bytes beside its record."""
    folder = tmp_path / "many"
    for shard in range(3):
        own = range(shard, samples, 3)
        members = [
            (f"{n}.{extension}", raw)
            for n in own
            for extension, raw in (("bin", bytes(100 * n)), ("json", json.dumps({"caption": f"{n}"}).encode()))
        ]
        write_tar(folder / f"{shard}.tar", members)
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_shards_are_shuffled_by_a_seed_and_sized_by_bytes_and_number(tmp_path):
    source = many(tmp_path)
    settings = Settings(seed=7, per_shard=9, shard_bytes=20000, held_out=4)
    build(source, tmp_path / "one", settings)
    build(source, tmp_path / "two", settings, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    numbers = [int(record["caption"]) for _, record in found(tmp_path / "one" / "train")]
    aside = [int(record["caption"]) for _, record in found(tmp_path / "one" / "held_out")]
    assert sorted(numbers + aside) == list(range(40)) and len(aside) == 4 and numbers != sorted(numbers)
    shards = [open_index(path) for path in find_shards(tmp_path / "one" / "train")]
    sizes = [sum(512 + -(-size // 512) * 512 for size in shard.all_members["size"].tolist()) for shard in shards]
    assert all(size <= 20000 and len(shard) <= 9 for size, shard in zip(sizes, shards, strict=True))
    full = [size + 4000 + 3072 > 20000 or len(shard) == 9 for size, shard in zip(sizes, shards, strict=True)]
    assert len(sizes) > 4 and all(full[:-1])
    build(source, tmp_path / "other", Settings(seed=8))
    assert [int(record["caption"]) for _, record in found(tmp_path / "other" / "train")] != numbers


KILLED = """
import os, signal, sys
from pathlib import Path
from data.build.build import Settings, build_shards
from data.build.find import find_source
from data.rows.samples import Columns
left = int(sys.argv[3])
def progress(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
build_shards(find_source(Path(sys.argv[1]), Columns()), Path(sys.argv[2]), Settings(per_shard=5), progress=progress)
"""


def test_a_build_that_is_killed_leaves_nothing_and_gives_the_same_shards_again(tmp_path):
    source, out = many(tmp_path), tmp_path / "killed"
    build(source, tmp_path / "whole", Settings(per_shard=5))
    for after in (3, 9):  # while the source is read, and while shards are written
        command = [sys.executable, "-c", KILLED, str(source), str(out), str(after)]
        assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == -signal.SIGKILL
        assert not out.exists() and (tmp_path / ".killed.building").exists()
    build(source, out, Settings(per_shard=5))
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "many", "whole"]
    with pytest.raises(DataError, match="killed is not empty"):
        build(source, out, Settings(per_shard=6))


def test_an_empty_folder_is_filled_and_stays_the_same(tmp_path):
    """It may be a mount, or the shell's current folder."""
    source, out = many(tmp_path), tmp_path / "there"
    out.mkdir()
    (out / ".building").mkdir()  # of a killed build
    inode = out.stat().st_ino
    build(source, out, Settings(held_out=4))
    build(source, tmp_path / "new", Settings(held_out=4))
    assert out.stat().st_ino == inode and contents(out) == contents(tmp_path / "new")
    assert sorted(path.name for path in out.iterdir()) == ["build.json", "held_out", "train"]
    with pytest.raises(DataError, match="there is not empty"):
        build(source, out, Settings())


def test_a_source_that_changes_meanwhile_is_not_mixed(media, tmp_path, monkeypatch):
    from data.build import build as module

    file, write_shards = written(tmp_path, RECORDS), module._write_shards

    def change(*given):
        (media / "two.png").write_bytes(image(9))
        write_shards(*given)

    monkeypatch.setattr(module, "_write_shards", change)
    with pytest.raises(DataError, match=r"two.png changed while shards were built"):
        build(file, tmp_path / "out", media=media)
    assert not (tmp_path / "out").exists()


def test_files_whose_names_differ_in_case_alone_are_named(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, raw in {"b.JPG": image(1), "b.jpg": image(2), "b.txt": b"a hill"}.items():
        (folder / name).write_bytes(raw)
    with pytest.raises(DataError, match=r"differ in case only: b\.JPG, b\.jpg"):
        build(folder, tmp_path / "out")
