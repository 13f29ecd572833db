"""Shards on web servers and in object storage: right, or a named error, and never other bytes."""

import os
from pathlib import Path

import pytest

from data.errors import DataError, ReadError, ShardError
from data.index.find_shards import find_shards
from data.index.index_file import catalogue_path
from data.loader import StepLoader
from data.order.step import Batching, Reader
from data.records.members import read_fields
from data.storage import files, object_store
from data.storage.files import ShardVersion
from data.storage.object_store import read_range, store_of
from data.storage.reader import RemoteReader, ShardReader, WholeObject
from data.storage.url import Url, place_of
from tests.http_server import serving
from tests.object_storage import environment, moto_server
from tests.tars import write_tar
from tests.unit.data.helpers import open_index, text_of

CONTENT = os.urandom(3000)
AT, SIZE = 1000, 500


@pytest.fixture(scope="module")
def server():
    with serving({"a.tar": CONTENT}) as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch, request):
    """Time-outs and pauses that a test does not wait for; the client's own tries stay."""
    monkeypatch.setattr(files, "_FIRST_PAUSE", 0.001)
    if "is_right_or_named" in request.node.name:
        monkeypatch.setattr(object_store, "IO", object_store.IoThread(patience=1.0))


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("right", ""),
        ("untagged", ""),
        ("500_twice", ""),
        ("cut_once", ""),
        ("500", r"500 Internal Server Error.*\(EIO\); tried 2 times"),
        ("403", r"\(EACCES\)"),
        ("404", r"\(ENOENT\)"),
        ("stalls", r"no answer of 500 bytes in 1 seconds \(ETIMEDOUT\); tried 2 times"),
        ("trickles", r"no answer of 500 bytes in 1 seconds \(ETIMEDOUT\)"),
        ("cut", r"\((EIO|ETIMEDOUT)\)"),
        ("short_honest", r"(the answer has 499 bytes of 500|.*) \(EIO\)"),
        ("short_false", r"the server sent 499 bytes as 1000 to 1500 \(EIO\)"),
        ("other_range", r"\(EIO\)"),
        ("ignores_range", r"\(ENOTSUP\)"),
    ],
)
def test_an_answer_is_right_or_named(way, words, server):
    url = Url.parse(server.url(way, "a.tar"))
    tag = "3000 1795219200.000000" if way == "untagged" else '"one"'
    reader, version = ShardReader(retries=1), ShardVersion(len(CONTENT), 0, 0, "", tag)
    if not words:
        assert reader.read(url, AT, SIZE, "jpg", version) == CONTENT[AT : AT + SIZE]
        return
    with pytest.raises(ReadError, match=f"^{url}: cannot read 500 bytes at byte 1000: .*{words}"):
        reader.read(url, AT, SIZE, "jpg", version)


@pytest.mark.parametrize("way", ["right", "ignores_match"])
def test_another_version_is_refused(way, server):
    version = ShardVersion(len(CONTENT), 0, 0, "", '"zero"')
    with pytest.raises(ShardError, match=rf"/{way}/a\.tar: the shard changed after it was indexed"):
        ShardReader(retries=3).read(Url.parse(server.url(way, "a.tar")), AT, SIZE, "jpg", version)


def test_what_is_announced_is_read_once_and_bounded(server):
    reader, url = RemoteReader(retries=0, ahead_bytes=1000), Url.parse(server.url("counted", "a.tar"))
    version = ShardVersion(len(CONTENT), 0, 0, "", '"one"')
    for at in (0, 500, 500, 1000):  # the third is known, the last pushes the first out
        reader.expect([(url, at, 500, version)])
    assert reader._bytes == 1000 and len(reader._started) == 2
    for at in (0, 500, 1000):
        assert reader.read(url, at, 500, version) == CONTENT[at : at + 500]
    # The one that was pushed out is asked for again, if it was sent at all before.
    assert reader._bytes == 0 and server.requests["counted"] in (3, 4)


def test_neighbours_are_read_together_and_what_is_far_apart_is_not(server):
    reader, url = RemoteReader(retries=0), Url.parse(server.url("counted", "a.tar"))
    version = ShardVersion(len(CONTENT), 0, 0, "", '"one"')
    before = server.requests["counted"]
    places = [(900, 100), (0, 500), (2000, 300), (520, 80), (1000, 0)]
    reader.expect([(url, *place, version) for place in places])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.storage.reader._GAP", 100)
        far = RemoteReader(retries=0)
        far.expect([(url, *place, version) for place in ((0, 500), (520, 80), (900, 100))])
        for one, asked in ((reader, places), (far, [(0, 500), (520, 80), (900, 100)])):
            for at, size in asked:
                assert one.read(url, at, size, version) == CONTENT[at : at + size]
            assert one._bytes == 0
    assert server.requests["counted"] - before == 1 + 2


def test_an_answer_for_neighbours_that_is_too_short_is_asked_for_again_alone(server):
    reader, url = RemoteReader(retries=1), Url.parse(server.url("right", "a.tar"))
    version = ShardVersion(len(CONTENT), 0, 0, "", '"one"')
    end = len(CONTENT)
    reader.expect([(url, end - 600, 500, version), (url, end - 100, 200, version)])
    assert reader.read(url, end - 600, 500, version) == CONTENT[-600:-100]
    with pytest.raises(ReadError, match=r"100 bytes of 200"):
        reader.read(url, end - 100, 200, version)


def test_reads_in_flight_are_bounded():
    """The loop has at most so many at once, and starves none."""
    import asyncio

    class Slow:
        def __init__(self):
            self.now = self.most = 0

        async def read(self, url, start, size, tag=""):
            self.now += 1
            self.most = max(self.most, self.now)
            for _ in range(3):
                await asyncio.sleep(0)
            self.now -= 1
            return memoryview(bytes(size))

    slow, thread = Slow(), object_store.IoThread(in_flight_reads=4)
    url = Url("s3", "slow", "a")
    object_store._STORES["s3", "slow"] = slow
    try:
        sizes = [10, 20, 60, 500, 1, 1, 1, 1, 1, 90, 30] * 5
        assert [len(one.result()) for one in thread.read_all([(url, 0, size, "") for size in sizes])] == sizes
        assert slow.most == 4
        # Together they wake the thread once; each has its own end.
        woken, wake = [], thread._loop.call_soon_threadsafe
        thread._loop.call_soon_threadsafe = lambda *args: woken.append(args) or wake(*args)
        several = thread.read_all([(url, 0, 5, ""), (Url("none", "such", "a"), 0, 5, ""), (url, 0, 7, "")])
        assert [len(several[at].result()) for at in (0, 2)] == [5, 7] and len(woken) == 1
        with pytest.raises(Exception, match="none"):
            several[1].result()
    finally:
        del object_store._STORES["s3", "slow"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://key:secret@bucket/a.tar", "has credentials in it"),
        ("https://host/a.tar?signature=secret", r"^https://host/a\.tar: a URL with \?, # or %2F is not read"),
        ("https://key:se?secret@host/a.tar", "has credentials in it"),
        ("https://host/a/%2e%2e/b.tar", r"has an empty part, \. or \.\."),
        ("https://host/a%FF.tar", "is no UTF-8"),
        ("s3://bucket/a//b.tar", "has an empty part"),
        ("s3:///a.tar", "is no URL"),
        ("pipe:cat a.tar", "is a command, .* such as a.tar$"),
        ("pipe:aws s3 cp s3://b/a.tar -", "is a command, .* such as s3://b/a.tar$"),
        ("s3://bucket/a.tar.gz", "cannot be indexed"),
        ("sftp://host/a.tar", "is not supported .*sshfs"),
        ("nosuch://host/a.tar", "is not supported .*copy it to"),
    ],
)
def test_what_is_no_place_of_shards(text, words):
    with pytest.raises(DataError, match=words) as raised:
        find_shards(text)
    assert "secret" not in str(raised.value)


def test_places():
    url = place_of("S3A://bucket/a/b.tar/")
    assert str(url) == "s3://bucket/a/b.tar" and url.name == "b.tar" and str(url.parent / "c") == "s3://bucket/a/c"
    assert place_of("a/b") == Path("a/b") and place_of("file:///a/b") == Path("/a/b")
    assert [str(one) for one in url.parents] == ["s3://bucket/a", "s3://bucket/"]
    with pytest.raises(TypeError):
        os.stat(url)
    for text in ("https://host/a%20b/100%25%3F.tar", "s3://bucket/a%20b.tar"):
        assert str(place_of(text)) == text and place_of(str(place_of(text))) == place_of(text)
    assert place_of("https://host/a%20b/c.tar") == place_of("https://host/a b/c.tar")


@pytest.fixture(scope="module")
def storage():
    with moto_server() as values, environment(values):
        yield


def upload(folder: Path, to: Url) -> None:
    for path in sorted(folder.glob("*.tar")):
        store_of(to).put(to / path.name, path.read_bytes())


@pytest.fixture
def remote(small, storage, request) -> Url:
    """The shards of `small` in object storage."""
    url = Url.parse(f"s3://bucket/{request.node.name}")
    upload(small, url)
    return url


def test_shards_are_found(remote, small, server):
    names = [path.name for path in find_shards(small)]
    every = [f"{remote}/{name}" for name in names]
    for pattern in (str(remote), f"{remote}/a-*.tar", f"{remote}/a-{{000000..000001}}.tar", ",".join(every)):
        assert [str(url) for url in find_shards(pattern)] == every, pattern
    store_of(remote).put(remote / "below" / "z.tar", b"")
    assert [found.url.name for found in store_of(remote).list(remote, deep=False)] == names
    assert [found.url.name for found in store_of(remote).list(remote)] == [*names, "z.tar"]
    assert [url.seen[0] for url in find_shards(str(remote))] == [path.stat().st_size for path in find_shards(small)]
    assert find_shards([f"file://{small}/{names[0]}", every[1]]) == [small / names[0], Url.parse(every[1])]
    web = server.url("right", "a.tar")
    assert [url.seen for url in find_shards(web)] == [(3000, '"one"')]
    for pattern, words in (
        (f"{remote}/a-{{000000..000002}}.tar", rf"nothing is at {remote}/a-000002\.tar"),
        (f"{remote}/b-*.tar", r"holds nothing that matches b-\*\.tar"),
        (f"{remote}/none", "nothing is at"),
        (web.replace("a.tar", "b.tar"), r"nothing is at http.*/right/b\.tar"),
    ):
        with pytest.raises(DataError, match=words):
            find_shards(pattern)


def test_a_run_reads_the_same_from_anywhere(remote, small, dataset, tmp_path, monkeypatch):
    """Tokens, images, fingerprint: as from files. The index is kept, and a changed shard is noticed."""
    import torch

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    here, there = dataset(), dataset(shards=str(remote))
    assert there.fingerprint == here.fingerprint and there.is_remote and not here.is_remote
    kept = catalogue_path(there.shards[0])
    assert kept.is_file() and kept.is_relative_to(tmp_path / "user")
    for workers in (0, 2):
        batches = []
        for one in (here, there):
            with StepLoader(
                one, Batching(4, 2), [Reader("language", 0, 1), Reader("images", 0, 1)], workers=workers, limit=4
            ) as steps:
                batches.append([microbatch for step in steps for microbatch in step.microbatches])
        for ours, theirs in zip(*batches, strict=True):
            assert torch.equal(ours["input_ids"], theirs["input_ids"])
            mine, others = (one["modality_inputs"]["images"] for one in (ours, theirs))
            assert (mine is None) == (others is None)
            assert mine is None or torch.equal(mine["images"]["pixels"], others["images"]["pixels"])
    assert there.reader._remote._bytes == 0, "all that was announced was read"

    monkeypatch.setattr("data.index.indexing._build", lambda *arguments: pytest.fail("built again"))
    again = dataset(shards=str(remote), cache_dir=None)
    shard = again.shards[0]
    store_of(shard).put(shard, (small / shard.name).read_bytes()[::-1])
    with pytest.raises(ShardError, match=rf"{shard}: the shard changed after it was indexed"):
        for number in range(len(again)):
            again.read_text(number)


def test_every_text_that_fields_name_is_announced(storage, dataset, tmp_path):
    texts = {"1.q.txt": b"Which?", "1.a.txt": b"This one.", "1.note.txt": b"is read by nobody"}
    url = Url.parse("s3://bucket/fields/a.tar")
    store_of(url).put(url, write_tar(tmp_path / "a.tar", texts.items()).read_bytes())
    fields = read_fields({"question": "q.txt", "answer": "a.txt"})
    there = dataset(shards=str(url), media=(), fields=fields, keep_text=True, cache_dir=tmp_path)
    for announce in (
        lambda: there.expect_samples([(0, {}, True)]),
        lambda: there.expect_texts(0, range(1)),
    ):
        announce()
        assert there.reader._remote._bytes == len(b"Which?This one.")
        assert [question for _, question in text_of(there, 0).questions] == ["Which?"]
        assert there.reader._remote._bytes == 0


def test_the_index_of_a_large_shard_reads_little_between_its_members(storage, tmp_path):
    """Members that are far apart: their headers and what is beside them."""
    members = [(f"{n}.{kind}", raw) for n in range(3) for kind, raw in (("bin", bytes(9 << 20)), ("txt", b"text"))]
    path, url = write_tar(tmp_path / "large.tar", members), Url.parse("s3://bucket/large/large.tar")
    store_of(url).put(url, path.read_bytes())
    read: list[int] = []
    submit = object_store.IoThread.read_all

    def counted(self, ranges):
        read.extend(size for _, _, size, _ in ranges)
        return submit(self, ranges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store.IoThread, "read_all", counted)
        index = open_index(url, tmp_path / "cache")
    assert [index.members(row) for row in range(3)] == [open_index(path).members(row) for row in range(3)]
    assert sum(read) < 0.7 * path.stat().st_size


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


def test_beyond_the_end_of_an_object_is_nothing():
    """Where headers of a damaged image point to, as in a file."""
    with serving({"a.tar": CONTENT}) as server:
        whole = WholeObject(Url.parse(server.url("right", "a.tar")), retries=0)
        for offset in (2000, 3000, 2 << 20, 9 << 20):
            assert whole.read(2000, offset) == CONTENT[offset:]
