"""The lock of a `checkpoint.dir`: one of two, a dead one's, one that stands still, one that is taken away."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from data.storage.object_store import store_of
from data.storage.url import Url
from mimo_train.config.errors import UserError
from mimo_train.launch import run_lock
from mimo_train.launch.run_lock import ObjectLock, require_seen
from tests.object_storage import environment, moto_server

NEVER = 3600.0


@pytest.fixture(scope="module", autouse=True)
def storage():
    with moto_server() as values, environment(values):
        yield


@pytest.fixture
def root(request) -> Url:
    return Url.parse(f"s3://bucket/{request.node.name}")


def holds(root: Url) -> subprocess.Popen:
    """Another process that holds the lock."""
    code = (
        "import sys\nfrom data.storage.url import Url\nfrom mimo_train.launch.run_lock import ObjectLock\n"
        f"lock = ObjectLock(Url.parse({str(root)!r}), beat=0.05)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def holder(root: Url) -> dict:
    from data.storage.object_store import read_range

    return json.loads(bytes(read_range(root / "lock", 0, 4096)))


def test_of_two_the_second_is_refused_until_the_first_is_gone(root):
    """Killed, it is known to be gone when its lock has stood still."""
    process = holds(root)
    with pytest.raises(UserError, match=rf"checkpoint\.dir: {root} is in use by process {process.pid} on "):
        ObjectLock(root, beat=NEVER)
    process.kill()
    process.communicate()
    lock = ObjectLock(root, "mark", beat=0.05)
    require_seen(root, "mark")
    with pytest.raises(UserError, match="does not see what rank 0 has written to"):
        require_seen(root, "another")
    lock.close()


def test_a_sign_of_life_while_the_lock_is_read_is_no_error(root, monkeypatch):
    lock, read = ObjectLock(root, beat=NEVER), run_lock.read_range
    beats = iter(range(3))

    def beaten(url, *place):
        if next(beats, None) is not None:
            store_of(root).put(url, lock._text())
        return read(url, *place)

    monkeypatch.setattr(run_lock, "read_range", beaten)
    assert lock._read()[0]["pid"] == os.getpid() and next(beats, None) is None
    lock.close()


def test_of_several_that_take_over_one_gets_it(root, monkeypatch):
    store_of(root).put(root / "lock", b'{"host": "gone"}')
    got, refused = [], []
    one_at_a_time, put = threading.Lock(), store_of(root).put

    def atomic(*place, **condition):  # as in real storage: moto compares, and then writes
        with one_at_a_time:
            return put(*place, **condition)

    monkeypatch.setattr(store_of(root), "put", atomic)

    def take():
        try:
            got.append(ObjectLock(root, beat=0.1, on_lost=refused.append))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lock,) = got
    assert lock._is_mine(holder(root)) and len(refused) == 3
    lock.close()


@pytest.mark.parametrize("holder_there", [True, False])
def test_a_run_whose_lock_was_taken_or_removed_is_told(root, holder_there):
    """Removed: another run may have taken it over while this process was stopped, and have ended since."""
    told = threading.Event()
    reasons: list[str] = []
    lock = ObjectLock(root, beat=0.05, on_lost=lambda reason: (reasons.append(reason), told.set()))
    with lock._guard:
        store_of(root).remove([root / "lock"])
        if holder_there:
            store_of(root).put(root / "lock", b'{"host": "other", "pid": 7, "mark": "another"}')
    assert told.wait(60)
    if holder_there:
        assert reasons[0].startswith(f"checkpoint.dir: {root} is in use by process 7 on other, since None: wait until")
        assert holder(root)["host"] == "other", "a lock of others stays"
    else:
        assert reasons == [
            f"checkpoint.dir: {root}/lock was removed: another run may have saved there meanwhile; this process ends"
        ]
    lock.close()


def test_errors_do_not_end_the_heartbeats(root, monkeypatch):
    lock, broken = ObjectLock(root, beat=0.05), threading.Semaphore(0)
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_read", lambda: broken.release() or {}["none"])
        assert all(broken.acquire(timeout=60) for _ in range(3))
    beats = holder(root)["beat"]
    while holder(root)["beat"] <= beats:
        time.sleep(0.01)
    lock.close()


def test_a_bucket_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"checkpoint\.dir: s3://no_bucket/run cannot be written \("):
        ObjectLock(Url.parse("s3://no_bucket/run"))
