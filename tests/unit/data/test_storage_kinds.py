"""What single kinds of storage do in their own way: Azure, web servers, file systems of fsspec."""

import os
import sys
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options

from data.errors import DataError
from data.index.shards import find_shards
from data.storage import other, retry
from data.storage.io_thread import read_range, start_read
from data.storage.remote import WholeObject
from data.storage.stores import store_of
from data.storage.url import Url
from tests.http_server import serving
from tests.object_storage import environment

CONTENT = os.urandom(3000)
BLOBS = b"""<EnumerationResults><Blobs><Blob><Name>shards/a.tar</Name><Properties><Content-Length>3000</Content-Length>
<Content-Type>application/x-tar</Content-Type><Last-Modified>Sat, 21 Nov 2026 00:00:00 GMT</Last-Modified>
<Etag>one</Etag></Properties></Blob></Blobs></EnumerationResults>"""


def test_tags_of_azure_are_the_same_in_lists_and_in_answers():
    with serving({"shards/a.tar": CONTENT}) as server:
        server.listing = BLOBS
        account = {"AZURE_STORAGE_ACCOUNT_NAME": "test", "AZURE_SKIP_SIGNATURE": "true"}
        with environment({"AZURE_STORAGE_ENDPOINT": server.url("", "").rstrip("/"), **account}):
            (shard,) = find_shards("az://container/shards")
            assert shard.seen == (3000, '"one"') == (3000, store_of(shard).look(shard).tag)
            assert read_range(shard, 1000, 500, shard.seen[1]) == CONTENT[1000:1500]


def test_a_web_server_is_asked_for_what_was_written():
    with serving({"a%20b.tar": CONTENT}) as server:
        (shard,) = find_shards(server.url("right", "a%20b.tar"))
        assert shard.name == "a b.tar" and read_range(shard, 1000, 500) == CONTENT[1000:1500]


def test_beyond_the_end_of_an_object_is_nothing(monkeypatch):
    """Where headers of a damaged picture point to, as in a file."""
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.0)
    with serving({"a.tar": CONTENT}) as server:
        whole = WholeObject(Url.parse(server.url("right", "a.tar")), retries=0)
        for offset in (2000, 3000, 2 << 20, 9 << 20):
            assert whole.read(2000, offset) == CONTENT[offset:]


class Hosted(MemoryFileSystem):
    """A file system that is connected to a host, whose name is in no path, as those of ftp and sftp are."""

    protocol = "hosted"

    def __init__(self, host, **arguments):
        super().__init__(**arguments)
        self.host = host

    @classmethod
    def _strip_protocol(cls, path):
        return infer_storage_options(path)["path"]

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"host": infer_storage_options(path)["host"]}

    def cat_file(self, path, start=None, end=None, **arguments):
        return self.asked(super().cat_file(path, start, end, **arguments))

    def asked(self, content):
        return content


@pytest.fixture
def hosted(monkeypatch) -> str:
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.0)
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    MemoryFileSystem().pipe({"/shards/a.tar": CONTENT, "/shards/q?.tar": CONTENT, "/shards/below/b.tar": CONTENT})
    with environment({}):
        yield "hosted://server/shards"
    MemoryFileSystem.store.clear()


def test_other_file_systems_are_read(hosted, small, dataset, tmp_path):
    files = fsspec.filesystem("memory")
    for path in small.glob("*.tar"):
        files.pipe(f"/host/{path.name}", path.read_bytes())
    there = dataset(shards="memory://host", cache_dir=tmp_path / "cache")
    assert there.fingerprint == dataset().fingerprint
    assert there.text(3).input_ids.tolist() == dataset().text(3).input_ids.tolist()

    shards = find_shards(hosted)
    assert [str(shard) for shard in shards] == [f"{hosted}/a.tar", f"{hosted}/q?.tar"]
    assert [read_range(shard, 1000, 500) for shard in shards] == [CONTENT[1000:1500]] * 2
    assert find_shards(str(shards[0])) == shards[:1] and store_of(shards[0])._connect().host == "server"


def test_reads_side_by_side_have_a_connection_each(hosted, monkeypatch):
    """On one of FTP they would get each other's bytes."""
    both, used = threading.Barrier(2), []

    def asked(self, content):
        used.append(self)
        both.wait()
        return content

    monkeypatch.setattr(Hosted, "asked", asked)
    (shard,) = find_shards(f"{hosted}/a.tar")
    begun = [start_read(shard, at, 500) for at in (0, 1000)]
    assert [bytes(one.result()) for one in begun] == [CONTENT[:500], CONTENT[1000:1500]]
    assert used[0] is not used[1]


def test_a_file_system_that_never_answers_is_left_behind(hosted, monkeypatch):
    """Its threads are none that the end of a process waits for."""
    release, threads = threading.Event(), []

    def wait_for_ever(*arguments, **others):
        threads.append(threading.current_thread())
        release.wait()
        raise OSError("too late")

    monkeypatch.setattr(Hosted, "info", wait_for_ever)
    monkeypatch.setattr(Hosted, "find", wait_for_ever)
    monkeypatch.setattr(other, "LOOK", 0.01)
    monkeypatch.setattr(other, "LIST", 0.01)
    url = Url.parse(f"{hosted}/a.tar")
    for ask in (lambda: store_of(url).look(url), lambda: [*store_of(url).list(url.parent)]):
        with pytest.raises(OSError, match=r"no answer in 0\.01 seconds: 'hosted://server/shards"):
            ask()
    begun = start_read(url, 0, 10)
    while len(threads) < 3:
        release.wait(0.001)
    assert all(thread.daemon and thread in threading.enumerate() for thread in threads)
    release.set()
    assert isinstance(begun.exception(), OSError)


def test_what_a_file_system_lacks_is_named(hosted, monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    for text, words in (
        ("sftp://host/a.tar", 'a library that is not installed (paramiko; fsspec says: SFTPFileSystem requires "par'),
        ("github://host/a.tar", "'org' and 'repo'): give each argument by the environment, as FSSPEC_GITHUB_ARGUMENT"),
    ):
        with pytest.raises(DataError) as raised:
            find_shards(text)
        assert words in str(raised.value) and "mimo-train[remote]" not in str(raised.value)
