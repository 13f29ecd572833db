"""Random members of remote shards, read as a run reads them, from a server that takes its time.

    python benchmarks/remote_reads.py
    python benchmarks/remote_reads.py --reads 3000 --blocks 5 --latency 0.03

A server in a process of its own waits before each answer, and gives ranges of objects of 1 GB. Two threads, as
`data.workers` has them, read members through `data.storage.reader`: announced some steps ahead, as the loader does it,
and not announced; a bare loop over obstore reads the same. Each beside a thread that trains, that is, computes in
Python without a pause, and beside none. Ways take turns within a block. Every answer is compared with what is right.
"""

import argparse
import asyncio
import multiprocessing
import random
import re
import resource
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from obstore.store import HTTPStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.storage.files import ShardVersion
from data.storage.object_store import IN_FLIGHT_READS
from data.storage.reader import RemoteReader
from data.storage.url import Url

OBJECT = 1 << 30
PERIOD = 1 << 20
"""Bytes after which the content of an object repeats itself."""
TAG = '"one"'
ANNOUNCED, BARE, SINGLE = "announced", "obstore alone", "not announced"
SHARDS, STEP, WORKERS = 50, 256, 2
"""Objects, members of a step (two steps are announced), and threads that read."""


def content() -> bytes:
    """Two periods, of which each range is a part."""
    return random.Random(0).randbytes(PERIOD) * 2


def serve(latency: float, port: Connection) -> None:
    """Answer ranges, after `latency` seconds each."""
    both = memoryview(content())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                first, last = map(int, re.search(r"[Rr]ange: bytes=(\d+)-(\d+)", head).groups())
                await asyncio.sleep(latency)
                start, size = first % PERIOD, last + 1 - first
                writer.write(
                    f"HTTP/1.1 206 Partial Content\r\nContent-Length: {size}\r\nETag: {TAG}\r\n"
                    f"Content-Range: bytes {first}-{last}/{OBJECT}\r\n"
                    "Last-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\n\r\n".encode()
                )
                writer.write(both[start : start + size])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        async with server:
            await server.serve_forever()

    asyncio.run(main())


def read(port: int, places: list[tuple[int, int]], size: int, *, announced: bool) -> None:
    """Read members at (object, first byte) by two threads, and compare them."""
    reader, right = RemoteReader(), content()
    version = ShardVersion(OBJECT, 0, 0, "", TAG)
    urls = [Url.parse(f"http://127.0.0.1:{port}/{number:04d}.tar") for number in range(SHARDS)]

    def expect(step: int) -> None:
        if announced:
            of_step = places[step * STEP : (step + 1) * STEP]
            reader.expect((urls[shard], at, size, version) for shard, at in of_step)

    def work(worker: int) -> None:
        for number in range(worker, len(places), WORKERS):
            if number % STEP == 0:
                expect(number // STEP + 1)
            shard, at = places[number]
            got = reader.read(urls[shard], at, size, version)
            assert len(got) == size and right.startswith(got, at % PERIOD)

    expect(0)
    with ThreadPoolExecutor(WORKERS) as workers:
        list(workers.map(work, range(WORKERS)))


def read_bare(port: int, places: list[tuple[int, int]], size: int) -> None:
    """The same reads by obstore alone: one loop, as many at once as ours has, every answer compared."""
    store = HTTPStore(f"http://127.0.0.1:{port}", client_options={"allow_http": True})
    right, left = content(), iter(places)

    async def one_after_the_other() -> None:
        for shard, at in left:
            answer = await store.get_async(f"{shard:04d}.tar", options={"range": (at, at + size), "if_match": TAG})
            got = bytes(await answer.bytes_async())
            assert len(got) == size and right.startswith(got, at % PERIOD)

    async def all_of_them() -> None:
        await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT_READS)))

    asyncio.run(all_of_them())


def trains(stop: threading.Event, done: list[int]) -> None:
    """Python that never rests; counts what it does."""
    while not stop.is_set():
        for _ in range(1000):
            done[0] += 1


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(port: int, reads: int, size: int, seed: int, *, way: str, busy: bool) -> tuple[float, float]:
    """(reads a second, processor seconds a GB, those of the busy thread aside)."""
    rng = random.Random(seed)
    places = [(rng.randrange(SHARDS), rng.randrange(OBJECT - size)) for _ in range(reads)]
    stop, done, own = threading.Event(), [0], [0.0]

    def beside() -> None:
        trains(stop, done)
        own[0] = time.thread_time()

    thread = threading.Thread(target=beside) if busy else None
    before, began = processor(), time.perf_counter()
    if thread is not None:
        thread.start()
    if way == BARE:
        read_bare(port, places, size)
    else:
        read(port, places, size, announced=way == ANNOUNCED)
    seconds = time.perf_counter() - began
    stop.set()
    if thread is not None:
        thread.join()
    return reads / seconds, (processor() - before - own[0]) / (reads * size / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=2000, help="of each way in a block")
    parser.add_argument("--bytes", type=int, default=100_000, help="of a member")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--blocks", type=int, default=5)
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(args.latency, theirs), daemon=True)
    server.start()
    port = ours.recv()
    ways = [(way, busy) for way in (ANNOUNCED, BARE, SINGLE) for busy in (True, False)]
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {way: [] for way in ways}
    for block in range(args.blocks):
        for way, busy in random.Random(block).sample(ways, len(ways)):
            reads = args.reads // 10 if way == SINGLE else args.reads  # one at a time takes as many times as long
            found[way, busy].append(measured(port, reads, args.bytes, block, way=way, busy=busy))
    for (way, busy), values in found.items():
        rates, costs = zip(*values, strict=True)
        print(
            f"{way}, {'beside a busy thread' if busy else 'alone'}: "
            f"{statistics.median(rates):,.0f} reads/s ({min(rates):,.0f} to {max(rates):,.0f}), "
            f"{statistics.median(costs):.2f} processor s/GB ({min(costs):.2f} to {max(costs):.2f})"
        )
    for busy in (True, False):
        ratios = [ours[0] / bare[0] for ours, bare in zip(found[ANNOUNCED, busy], found[BARE, busy], strict=True)]
        beside = "beside a busy thread" if busy else "alone"
        print(f"{beside}: announced reads are {statistics.median(ratios):.2f} x as fast as obstore alone")
    server.terminate()


if __name__ == "__main__":
    main()
