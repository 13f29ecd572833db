"""What is kept of remote shards: read once, never of another content, bounded, and never in the way."""

import threading
from pathlib import Path

import pytest

from data.errors import ShardError
from data.storage.file_cache import FileCache
from data.storage.files import ShardVersion
from data.storage.reader import RemoteReader
from data.storage.url import Url
from mimo_train.config.compose import load
from mimo_train.inputs.datasets import members_cache
from tests.hang import HANG_SECONDS
from tests.unit.data.storage.test_remote import CONTENT, server  # noqa: F401

ONE = ShardVersion(len(CONTENT), 0, 0, "", '"one"')
PLACES = [(at, 200) for at in range(0, 2000, 200)]


def kept(folder, most=10**6, writers=1):
    return FileCache(folder, most, suffix=".member", what="members", writers=writers)


def reader(folder, **options):
    return RemoteReader(retries=0, cache=kept(folder, **options))


def read_all(one, url):
    one.expect([(url, *place, ONE) for place in PLACES])
    assert [one.read(url, *place, ONE) for place in PLACES] == [CONTENT[at : at + size] for at, size in PLACES]


def test_what_another_reader_kept_is_not_asked_for(server, tmp_path):  # noqa: F811
    url = Url.parse(server.url("counted", "a.tar"))
    read_all(reader(tmp_path), url)
    before = server.requests["counted"]
    second = reader(tmp_path)
    read_all(second, url)
    assert before > 0 and server.requests["counted"] == before and not second._started and not second._bytes


def test_another_tag_is_another_content_and_without_one_nothing_is_kept(server, tmp_path):  # noqa: F811
    url = Url.parse(server.url("right", "a.tar"))
    read_all(reader(tmp_path), url)
    other = ShardVersion(len(CONTENT), 0, 0, "", '"zero"')
    with pytest.raises(ShardError, match="changed after it was indexed"):
        reader(tmp_path).read(url, 0, 200, other)
    files = len([*tmp_path.glob("??/*")])
    assert reader(tmp_path).read(url, 0, 300, None) == CONTENT[:300] and len([*tmp_path.glob("??/*")]) == files == 10


def test_a_damaged_file_is_read_again_from_the_storage(server, tmp_path):  # noqa: F811
    url = Url.parse(server.url("right", "a.tar"))
    read_all(reader(tmp_path), url)
    for number, path in enumerate(sorted(tmp_path.glob("??/*"))):
        raw = bytearray(path.read_bytes())
        if number % 2:
            raw[-1] ^= 1
        path.write_bytes(raw[: len(raw) - 7 * (number % 3)])
    read_all(reader(tmp_path), url)
    read_all(reader(tmp_path), url)


def test_writers_at_once_stay_within_the_bytes_and_get_their_own(tmp_path):
    most, writers = 100_000, 4
    caches = [kept(tmp_path, most, writers) for _ in range(writers)]

    def work(own: int) -> None:
        for number in range(300):
            caches[own].write(f"{own} {number}", bytes([number % 251]) * 900)
            caches[own].read(f"{own} 0")  # used all the time
            found = caches[(own + 1) % writers].read(f"{own} {number // 2}")
            assert found is None or found == bytes([number // 2 % 251]) * 900

    threads = [threading.Thread(target=work, args=(own,)) for own in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [*tmp_path.glob("??/*")]
    assert 0.5 * most < sum(path.stat().st_size for path in files) <= most
    assert all(path.suffix == ".member" for path in files)


def test_a_disk_that_fails_only_ends_the_keeping(server, tmp_path, monkeypatch):  # noqa: F811
    url, full = Url.parse(server.url("right", "a.tar")), reader(tmp_path)

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.warns(UserWarning, match="no more members are kept in this run"):
        read_all(full, url)
    read_all(full, url)
    assert not [*tmp_path.glob("??/*")]


def test_nobody_waits_for_a_thread_that_makes_room(tmp_path, monkeypatch):
    most, begun, ends = 100_000, threading.Event(), threading.Event()
    cache, made = kept(tmp_path, most), FileCache._make_room

    def slowly(own):
        begun.set()
        assert ends.wait(HANG_SECONDS)
        made(own)

    for number in range(21):  # of 916 bytes with their checksums, and 20,000 are written before room is made
        cache.write(f"{number}", bytes(900))
    monkeypatch.setattr(FileCache, "_make_room", slowly)
    thread = threading.Thread(target=cache.write, args=("first above", bytes(900)))
    thread.start()
    assert begun.wait(HANG_SECONDS)
    cache.write("meanwhile", bytes(900))
    assert cache.read("3") == bytes(900) and not cache.has("meanwhile")
    ends.set()
    thread.join()
    cache.write("afterwards", bytes(900))
    assert cache.has("first above") and cache.has("afterwards")


def test_the_keys_of_a_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    remote = ("data.shards=s3://bucket/train", "data.demo=", "data.validation_shards=")
    assert members_cache(load("gpt_tiny", remote)) is None and not (tmp_path / "user").exists()
    members_cache(load("gpt_tiny", (*remote, "data.cache_bytes=1000")))
    assert (tmp_path / "user" / "mimo-train" / "members").is_dir()
    members_cache(load("gpt_tiny", (*remote, "data.cache_bytes=1000", f"data.cache_dir={tmp_path}/own")))
    assert (tmp_path / "own" / "members").is_dir()
    local = load("gpt_tiny", ("data.shards=somewhere", "data.cache_bytes=1000"))
    assert [fault.key for fault in local.data.faults()].count("data.cache_bytes") == 1
