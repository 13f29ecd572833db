"""What single kinds of storage do in their own way: Azure, web servers, and what is not supported."""

import os

import pytest

from data.errors import DataError
from data.index.find_shards import find_shards
from data.storage import files
from data.storage.object_store import read_range, store_of
from data.storage.reader import WholeObject
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
    """Where headers of a damaged image point to, as in a file."""
    monkeypatch.setattr(files, "_FIRST_PAUSE", 0.0)
    with serving({"a.tar": CONTENT}) as server:
        whole = WholeObject(Url.parse(server.url("right", "a.tar")), retries=0)
        for offset in (2000, 3000, 2 << 20, 9 << 20):
            assert whole.read(2000, offset) == CONTENT[offset:]


@pytest.mark.parametrize(
    ("url", "remedy"),
    [("hf://datasets/a/b.tar", "hf download"), ("sftp://host/a.tar", "sshfs"), ("memory://a/b.tar", "copy it to")],
)
def test_a_url_that_nothing_reads_says_what_to_do(url, remedy):
    with pytest.raises(DataError, match=rf"{url}: \w+:// is not supported \(s3://.* are\): .*{remedy}"):
        find_shards(url)
