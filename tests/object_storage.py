"""A local S3 server (moto) in a process of its own, and what tests do in it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from data.storage.object_store import _STORES

BUCKET = "bucket"

_SERVER = f"""
import sys
import moto.s3.models
from moto.server import ThreadedMotoServer
moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 0  # so that tiny files have several parts
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
import urllib.request
host, port = server.get_host_and_port()
urllib.request.urlopen(urllib.request.Request(f"http://{{host}}:{{port}}/{BUCKET}", method="PUT")).read()
print(port, flush=True)
sys.stdin.read()
"""


@contextmanager
def moto_server() -> Iterator[dict[str, str]]:
    """The environment in which `s3://bucket` is an empty bucket of a new server. The server ends with the block, or
    with this process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """These variables, for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    _STORES.clear()  # of a server before
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
