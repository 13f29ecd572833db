"""Memory stays flat however many batches are read. The suite reads a few hundred; the whole soak is

MIMO_SOAK_BATCHES=10000 scripts/test.sh tests/unit/data/test_soak.py -s
"""

import gc
import os
import tracemalloc
from pathlib import Path

import pytest

from data.loader import StepLoader
from data.order.sources import Source
from data.order.step import Batching, Reader
from data.order.step_plan import Padding
from data.samples.text_lengths import TextLengths
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images

BATCHES = int(os.environ.get("MIMO_SOAK_BATCHES", "300"))
OF_OBJECTS, OF_ALL = 400_000, 16 << 20
"""Bytes that may come after the first third: of Python's and numpy's own, and of the process."""


def private() -> int:
    """Bytes of memory that the process shares with no file."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def grown(data, batches, keep=lambda batch: None):
    """(bytes of objects, bytes of the process) by which memory grows from a third of the batches on."""
    readers = [Reader("language", 0, 1), Reader("images", 0, 1)]
    tracemalloc.start()
    try:
        with StepLoader(data, Batching(8, 4, padding=Padding()), readers, workers=2, limit=batches) as steps:
            for at, batch in enumerate(steps):
                keep(batch)
                if at == batches // 3:
                    del batch
                    gc.collect()
                    before = tracemalloc.get_traced_memory()[0], private()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before[0], private() - before[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def mixed(dataset, tmp_path):
    """Two sources of four shards each, 80 samples with and without images of many sizes, some of them bad."""
    for shard in range(8):
        members = []
        for n in range(10):
            if n % 3:
                members.append((f"{n}.jpg", encode_image(16 + 3 * n, 20 + shard) if n != 7 else b"no image"))
            text = chat("<image>?" if n % 3 else "?", "word " * (n + shard))
            members.append((f"{n}.json", text if n != 6 else b"no record"))
        write_tar(tmp_path / f"source{shard % 2}" / f"s-{shard}.tar", members)
    sources = [Source(f"s{at}", tmp_path / f"source{at}", weight=1 + at) for at in (0, 1)]
    data = dataset(sources, media=[images()], sequence_length=64, max_bad_samples=1 << 40)
    list(TextLengths(data).build(processes=1))
    TextLengths(data).serve()
    yield data
    data.close()


@pytest.mark.timeout(3600)
def test_memory_stays_flat(mixed):
    objects, process = grown(mixed, BATCHES)
    print(f"{BATCHES} batches: {objects / 1e3:+,.0f} kB of objects, {process / 1e6:+,.1f} MB of the process")
    assert objects < OF_OBJECTS and process < OF_ALL


def test_batches_that_are_kept_would_show(mixed):
    kept = []
    objects, _ = grown(mixed, 120, kept.append)
    assert objects > OF_OBJECTS
