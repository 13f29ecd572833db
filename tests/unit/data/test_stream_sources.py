"""Where streams come from: commands, the web, compressed files; how they fail there, and what is found."""

import gzip
import threading
import time

import pytest

from data.errors import DataError, ReadError, ShardError
from data.pipeline import Dataset, StreamDataset
from data.reading import READS
from data.storage.command import Command
from data.storage.streams import Stream
from data.storage.url import Url
from data.storage.web_bytes import WebBytes
from data.streams.find import find_streams, is_stream
from mimo_train.cli import main
from tests.http_server import serving
from tests.tars import write_tar
from tests.unit.data.streaming import one_shard, stream


def test_a_command_that_fails_names_its_code_and_words(small):
    tar = small / "a-000000.tar"
    with pytest.raises(
        ShardError, match=r"^pipe:.*the command ended with exit code 3 after .* bytes: no more \(in sample"
    ):
        one_shard(Command(f"head -c 4000 '{tar}'; echo no more >&2; exit 3"))
    with pytest.raises(ShardError, match="exit code 1 .*No such file"):  # of a part of a pipeline
        one_shard(Command("cat /nowhere/a.tar | cat"))
    with pytest.raises(ShardError, match="was ended by SIGTERM"):
        one_shard(Command("kill -TERM $$"))
    with pytest.raises(ShardError, match="was ended by signal 40 after 0 bytes"):  # which has no name
        one_shard(Command("kill -40 $$"))
    with pytest.raises(ShardError, match="truncated at "):  # it says that all is well
        one_shard(Command(f"head -c 4000 '{tar}'"))
    assert len(one_shard(Command(f"cat '{tar}'; sleep 0.1"))) == 6


def test_a_command_that_stands_still_is_named_and_ends_with_the_run(small, tmp_path):
    mark = tmp_path / "ended"
    data = stream(f"pipe:trap 'touch {mark}' EXIT; head -c 2000 '{small}/a-000000.tar'; exec sleep 1000")
    waiting = threading.Thread(target=lambda: pytest.raises(DataError, data.plan_step, 0, 13))
    waiting.start()
    while not READS.longest().endswith("exec sleep 1000"):
        time.sleep(0.01)
    process = data._reading._current._stream._raw._process
    data.close()
    waiting.join()
    assert process.wait() < 0


def test_reading_that_is_ended_before_its_shard_is_open_ends(small):
    data = stream("pipe:sleep 997")
    for _ in range(8):  # at any moment of its beginning
        waiting = threading.Thread(target=lambda: pytest.raises(DataError, data.plan_step, 0, 13))
        waiting.start()
        while data._reading is None:
            time.sleep(0.001)
        reading = data._reading
        data.close()
        waiting.join()
        assert not reading._thread.is_alive()


def test_a_web_server_without_ranges(small):
    content = gzip.compress((small / "a-000000.tar").read_bytes())
    with serving({"a.tar.gz": content}) as server:
        whole = one_shard(Url.parse(server.url("ignores_range", "a.tar.gz")))
        assert whole == one_shard(Url.parse(server.url("right", "a.tar.gz"))) and len(whole) == 6
        with pytest.raises(ReadError, match="404"):
            one_shard(Url.parse(server.url("404", "a.tar.gz")))
        with pytest.raises(ReadError, match="500"):
            one_shard(Url.parse(server.url("500", "a.tar.gz")))


def test_a_connection_that_is_cut_goes_on_where_it_was(small, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    content = (small / "a-000000.tar").read_bytes()
    with serving({"a.tar": content}) as server:
        raw = WebBytes(Url.parse(server.url("ignores_range", "a.tar")), 2)
        begun = raw.read(1000)
        raw._drop()
        assert begun + raw.readall() == content
        raw = WebBytes(Url.parse(server.url("ignores_range", "a.tar")), 2)
        raw.read(1000)
        raw._drop()
        server.tags["a.tar"] = '"two"'
        with pytest.raises(ShardError, match="the file changed while it was read"):
            raw.read(10)


def test_a_file_that_changes_is_an_error(tmp_path):
    path = write_tar(tmp_path / "a.tar", [(f"{n}.txt", bytes(100_000)) for n in range(40)])
    data = stream(path, media=(), sequence_length=8)
    opened = Stream(path, 0)
    opened.read(10, 0)
    path.write_bytes(path.read_bytes() + bytes(1024))
    with pytest.raises(ShardError, match="the shard changed while it was read"):
        opened.read(10, 3_000_000)
    opened.close()
    data.close()


def test_what_is_found(small, squeezed, tmp_path):
    assert [path.name for path in find_streams(str(squeezed))] == ["a-000000.tar.gz", "a-000001.tar.gz"]
    assert find_streams("pipe:cat x-{0..1}.tar, y") == [Command("cat x-0.tar, y"), Command("cat x-1.tar, y")]
    assert str(find_streams("http://host/a-{0..1}.tgz")[1]) == "http://host/a-1.tgz"
    with pytest.raises(DataError, match="no command"):
        find_streams("pipe: ")
    with pytest.raises(DataError, match="a command among others"):
        find_streams([str(squeezed), "pipe:cat b.tar"])
    (small / "a-000000.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="would both be read"):
        find_streams(str(small))
    with pytest.raises(DataError, match=r"no \*\.tar and no \*\.tar\.gz"):
        find_streams(str(tmp_path))


def test_shards_without_samples_are_said(tmp_path):
    write_tar(tmp_path / "a.tar", [("README", b"none")])
    data = stream(tmp_path)
    with pytest.raises(DataError, match="no sample in 1 shard, for example"):
        data.plan_step(0, 1)
    data.close()


def test_fingerprints_follow_files(small, squeezed):
    one = stream(squeezed).fingerprint
    assert one == stream(squeezed).fingerprint != stream(small).fingerprint
    assert isinstance(one, str) and Dataset is not StreamDataset
    path = squeezed / "a-000001.tar.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    assert stream(squeezed).fingerprint != one


def test_a_folder_of_compressed_shards_is_looked_at_as_such(squeezed, small, tmp_path, capsys):
    assert is_stream(str(squeezed)) and not is_stream(str(small)) and not is_stream(str(tmp_path / "none"))
    names = sorted(path.name for path in squeezed.iterdir())
    assert main(["shards", "verify", str(squeezed)]) == 0
    output = capsys.readouterr()
    assert main(["shards", "verify", str(squeezed / "*.tar.gz")]) == 0
    assert capsys.readouterr().out == output.out and "13 samples" in output.out
    assert main(["shards", "inspect", str(squeezed)]) == 0 and "13" in capsys.readouterr().out
    for source in (squeezed, squeezed / names[0]):
        assert main(["shards", "build", str(source), "--to", str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert names[0] in said and "data.stream=true" in said and not (tmp_path / "out").exists()
